//! An adapter without files: random factors on every projection of attention and of the experts or the
//! dense MLP. Gate and up have one A, as in files that fuse them.

use amphora_hal::DType;

use crate::adapter::{AdapterFactors, Layouts, Matrix, ModuleFactor, Target};
use crate::config::Config;
use crate::lora_slices::LoraSlices;

/// What each layer's projections take.
const TARGETS: [Target; 7] =
    [Target::Q, Target::K, Target::V, Target::O, Target::Gate, Target::Up, Target::Down];

/// Random factors of `rank` on whatever projections the layers have.
pub fn adapter(config: &Config, slices: &LoraSlices, rank: usize) -> AdapterFactors {
    let mut made = Maker { state: 1, rank, modules: Vec::new(), shrinks: Vec::new() };
    for layer in 0..config.layers() {
        for target in TARGETS {
            let meta = slices.id(layer, target).and_then(|id| slices.layout().meta(id));
            let Some(meta) = meta else { continue };
            let experts = meta.experts > 1;
            for expert in 0..meta.experts {
                made.module(layer, target, experts.then_some(expert), [meta.k, meta.n]);
            }
        }
    }
    let Maker { modules, shrinks, .. } = made;
    AdapterFactors {
        modules,
        shrinks,
        layouts: Layouts::default(),
        dtype: DType::F32,
        file_bytes: 0,
        peft_version: None,
        base_model: None,
        notes: Vec::new(),
    }
}

struct Maker {
    state: u64,
    rank: usize,
    modules: Vec<ModuleFactor>,
    shrinks: Vec<Matrix>,
}

impl Maker {
    fn module(&mut self, layer: usize, target: Target, expert: Option<usize>, [k, n]: [usize; 2]) {
        let of_gate =
            |m: &ModuleFactor| (m.layer, m.target, m.expert) == (layer, Target::Gate, expert);
        // An expert's gate lies as many modules back as the layer has experts.
        let gate = (target == Target::Up)
            .then(|| self.modules.iter().rev().find(|m| of_gate(m)).map(|m| m.shrink))
            .flatten();
        let shrink = gate.unwrap_or_else(|| {
            let a = self.matrix(self.rank, k);
            self.shrinks.push(a);
            self.shrinks.len() - 1
        });
        let b = self.matrix(n, self.rank);
        let (rank, scale) = (self.rank, 1.0);
        self.modules.push(ModuleFactor { layer, target, expert, rank, scale, shrink, b });
    }

    fn matrix(&mut self, rows: usize, cols: usize) -> Matrix {
        // Xorshift (Marsaglia 2003), three numbers a draw; a hundredth of a unit each.
        let mut data = Vec::with_capacity(rows * cols + 2);
        while data.len() < rows * cols {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            for shift in [0, 21, 42] {
                let bits = (self.state >> shift) & 0xfffff;
                data.push((bits as f32 / 524_288.0 - 1.0) * 0.01);
            }
        }
        data.truncate(rows * cols);
        Matrix { rows, cols, data }
    }
}
