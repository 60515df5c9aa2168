//! What a model computes: its layer of experts, its dense projections, and the rows of its steps.

use amphora_engine::measure::dense::Shape;
use amphora_engine::measure::experts::Model;
use amphora_hal::DType;
use amphora_hal::ops::Activation;
use amphora_model::Config;
use amphora_model::config::MlpKind;

use crate::cli::TuneArgs;

/// Most rows that go through the head.
const HEAD_ROWS: usize = 64;

/// The shapes of a model.
#[derive(Debug)]
pub struct Shapes {
    pub experts: Option<Model>,
    /// Projections that adapters change, each shape once.
    pub projections: Vec<Shape>,
    /// The projection to the vocabulary.
    pub head: Shape,
    /// Rows of buckets that are searched.
    pub tokens: Vec<usize>,
}

impl Shapes {
    pub fn new(config: &Config, args: &TuneArgs) -> Self {
        let most = args.max_batch_tokens;
        let mut tokens: Vec<usize> = (0..).map(|i| 1 << i).take_while(|&t| t < most).collect();
        tokens.push(most);
        let (hidden, q, kv) = (config.hidden, config.q_width(), config.kv_width());
        let shape = |k, slices: &[usize]| {
            let (slices, out) = (slices.to_vec(), DType::BF16);
            Shape { k, slices, tokens: most, out, bias: false }
        };
        // Logits, of experts and of the vocabulary, are f32: a library's sums can lie in them.
        let mut projections = vec![shape(hidden, &[q, kv, kv]), shape(q, &[hidden])];
        let has = |kind| config.mlps.contains(&kind);
        if has(MlpKind::Dense) {
            let inner = config.dense_intermediate;
            projections.extend([shape(hidden, &[inner, inner]), shape(inner, &[hidden])]);
        }
        if has(MlpKind::Experts) {
            projections.push(Shape { out: DType::F32, ..shape(hidden, &[config.experts]) });
        }
        let mut different: Vec<Shape> = Vec::new();
        for shape in projections {
            if different.iter().all(|other| (other.k, other.n()) != (shape.k, shape.n())) {
                different.push(shape);
            }
        }
        let experts = has(MlpKind::Experts).then_some(Model {
            name: "model",
            hidden,
            inner: config.intermediate,
            experts: config.experts,
            top_k: config.top_k,
            gpt_oss: matches!(config.activation, Activation::ClampedInterleaved { .. }),
        });
        let (rows, out) = (HEAD_ROWS.min(most), DType::F32);
        let head = Shape { tokens: rows, out, ..shape(hidden, &[config.vocab]) };
        Shapes { experts, projections: different, head, tokens }
    }
}

#[cfg(test)]
mod tests {
    use amphora_model::ModelFiles;
    use amphora_model::synthetic::Spread;

    use super::*;

    #[test]
    fn every_product_of_a_model_is_there_once() {
        let args = TuneArgs {
            model: String::new(),
            output: "tuned".into(),
            budget: 1,
            operators: Vec::new(),
            adapters: 8,
            max_batch_tokens: 1600,
        };
        let of = |name| {
            let files = ModelFiles::synthetic(name, Spread::default()).expect("a shape");
            Shapes::new(&Config::read(&files).expect("sound"), &args)
        };
        let gpt_oss = of("gpt-oss-20b");
        let sizes: Vec<_> = gpt_oss.projections.iter().map(|s| (s.k, s.n())).collect();
        assert_eq!(sizes, [(2880, 5120), (4096, 2880), (2880, 32)]);
        assert_eq!((gpt_oss.head.n(), gpt_oss.head.tokens), (201_088, 64));
        let outs: Vec<_> =
            gpt_oss.projections.iter().chain([&gpt_oss.head]).map(|s| s.out).collect();
        assert_eq!(outs, [DType::BF16, DType::BF16, DType::F32, DType::F32]);
        assert_eq!(gpt_oss.tokens, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1600]);
        assert!(gpt_oss.experts.is_some_and(|experts| experts.gpt_oss));
        let dense = of("qwen3-32b");
        assert_eq!((dense.experts.is_none(), dense.projections.len()), (true, 4));
    }
}
