//! What tuning data can choose, each by itself: the cases of the operators that it changes, run through a
//! handle whose data says nothing else.

use amphora_backend_cuda::Cuda;
use amphora_backend_cuda::tuning::{AnyFile, Tuning};
use amphora_tests::cases;
use amphora_tests::harness::Case;
use amphora_tests::laws::{self, RowLaw};

/// One lever.
struct Lever {
    /// What stands in front of its cases' names.
    name: &'static str,
    operator: &'static str,
    /// `use` of an entry for all calls.
    choice: &'static str,
    /// What the names of its cases begin with.
    cases: &'static [&'static str],
}

const fn lever(
    name: &'static str,
    [operator, choice]: [&'static str; 2],
    cases: &'static [&'static str],
) -> Lever {
    Lever { name, operator, choice, cases }
}

const F32: &[&str] = &["lora_linear/f32/", "fused_moe_lora/f32/"];
const EXPERTS: &[&str] = &["fused_moe_lora/bf16/"];

const DENSE: &[&str] = &["lora_linear/bf16/"];

const LEVERS: &[Lever] = &[
    lever("narrow,split_k=2", ["linear", r#"{"path": "narrow", "parts": 2}"#], DENSE),
    lever("wide", ["linear", r#"{"path": "wide"}"#], DENSE),
    lever("narrow,group=2", ["linear", r#"{"path": "narrow", "group": 2}"#], DENSE),
    lever("narrow,even_k", ["linear", r#"{"path": "narrow", "even_k": true}"#], DENSE),
    lever(
        "narrow,deltas_apart",
        ["linear", r#"{"path": "narrow", "parts": 2, "deltas": "apart"}"#],
        DENSE,
    ),
    lever(
        "narrow,atomic",
        ["linear", r#"{"path": "narrow", "parts": 2, "deltas": "apart", "order": "atomic"}"#],
        DENSE,
    ),
    lever("library", ["linear", r#"{"path": "library"}"#], DENSE),
    lever("shrink=32x2", ["lora_linear", r#"{"rank_rows": 32, "rank_parts": 2}"#], DENSE),
    lever("split_k=2,ordered", ["lora_shrink", r#"{"parts": 2, "order": "ordered"}"#], F32),
    lever("split_k=2,atomic", ["lora_shrink", r#"{"parts": 2, "order": "atomic"}"#], F32),
    lever("deltas_apart", ["fused_moe", r#"{"path": "general", "deltas": "apart"}"#], EXPERTS),
    lever("warps", ["fused_moe", r#"{"path": "warps"}"#], EXPERTS),
    lever("warps,even_k", ["fused_moe", r#"{"path": "warps", "even_k": true}"#], EXPERTS),
    lever(
        "warps,32x4",
        ["fused_moe", r#"{"path": "warps", "tile_tokens": 32, "stages": 4}"#],
        EXPERTS,
    ),
    lever(
        "warps,128x3",
        ["fused_moe", r#"{"path": "warps", "tile_tokens": 128, "stages": 3}"#],
        EXPERTS,
    ),
];

impl Lever {
    fn tuning(&self) -> Tuning {
        let Lever { operator, choice, .. } = self;
        let entry = format!(r#"{{"when": {{}}, "use": {choice}}}"#);
        let text = format!(r#"{{"gpu": "any", "operator": "{operator}", "entries": [{entry}]}}"#);
        let mut tuning = Tuning::default();
        tuning.put_first(AnyFile::parse(&text).expect("the list above is sound"));
        tuning
    }
}

/// Of a lever's cases, every so many-th runs: together they would take longer than all others.
const EVERY: usize = 2;

/// Laws that every lever keeps but those whose sums come in any order.
const LAWS: [&str; 2] = ["base_rows_are_untouched", "adapters_do_not_see_each_other"];

/// The cases of every lever, and the laws. An entry is for all calls, and those that it does not fit go as
/// ever.
pub fn cases(device: &Cuda) -> Vec<Case<Cuda>> {
    let of = |lever: &'static Lever| {
        let tuning = lever.tuning();
        let its_own = |case: &Case<Cuda>| lever.cases.iter().any(|of| case.name.starts_with(of));
        let chosen = cases::all(device).into_iter().filter(its_own).step_by(EVERY);
        let any_order = lever.choice.contains("atomic");
        let law =
            move |case: &Case<Cuda>| !any_order && LAWS.iter().any(|of| case.name.ends_with(of));
        chosen
            .chain(laws::all(RowLaw::Near).into_iter().filter(law))
            .map(|Case { name, run }| {
                let tuning = tuning.clone();
                Case {
                    name: format!("{}/{name}", lever.name),
                    run: Box::new(move |device: &Cuda, seed| {
                        run(&device.with_tuning(tuning.clone()), seed)
                    }),
                }
            })
            .collect::<Vec<_>>()
    };
    LEVERS.iter().flat_map(of).collect()
}
