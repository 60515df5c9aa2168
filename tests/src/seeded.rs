//! Adapters made from a seed, of any rank, for tests that want many unlike ones.

use amphora_hal::DType;
use amphora_model::adapter::{AdapterBase, AdapterFactors, Layouts, Matrix, ModuleFactor, Target};

use crate::rng::Rng;

/// An adapter on about half of what can be adapted, or on all of it, each module at a rank of its own
/// up to `rank`.
pub fn adapter(base: &AdapterBase, seed: u64, rank: usize) -> AdapterFactors {
    let mut rng = Rng::new(seed, "churn");
    let (mut modules, mut shrinks) = (Vec::new(), Vec::new());
    for layer in 0..base.layers() {
        for target in Target::ALL {
            let Some((k, n)) = base.dims(layer, target) else { continue };
            let experts = match base.experts_of(layer, target) {
                Some(experts) => (0..experts).map(Some).collect(),
                None => vec![None],
            };
            for expert in experts {
                if rng.below(2) == 0 {
                    continue;
                }
                let rank = if rng.below(3) == 0 { 1 + rng.below(rank) } else { rank };
                let mut matrix = |rows: usize, cols: usize| {
                    let data = (0..rows * cols).map(|_| rng.below(2001) as f32 / 2e4 - 0.05);
                    Matrix { rows, cols, data: data.collect() }
                };
                shrinks.push(matrix(rank, k));
                let b = matrix(n, rank);
                let (shrink, scale) = (shrinks.len() - 1, 2.0 / (rank as f32).sqrt());
                modules.push(ModuleFactor { layer, target, expert, rank, scale, shrink, b });
            }
        }
    }
    let (dtype, file_bytes, notes) = (DType::F32, 0, Vec::new());
    let (peft_version, base_model) = (None, None);
    let layouts = Layouts::default();
    AdapterFactors { modules, shrinks, layouts, dtype, file_bytes, peft_version, base_model, notes }
}
