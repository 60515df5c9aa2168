//! What tuning data can choose, each by itself, through a handle whose data says nothing else: the operator is
//! right, keeps the laws, and the kernels of the choice are those that ran.
//!
//! Data that does not fit a call is passed over for the heuristic, so a case that did not look would hold
//! the heuristic's kernel against itself. The calls of `calls.rs` are such that no heuristic chooses what
//! the lever does.

use std::sync::Arc;

use amphora_backend_cuda::tuning::{AnyFile, Tuning};
use amphora_backend_cuda::{Cuda, Launched};
use amphora_tests::cases;
use amphora_tests::harness::{Case, Failure};

use super::calls::{self, Laws};

/// One lever.
struct Lever {
    /// What stands in front of its cases' names.
    name: &'static str,
    operator: &'static str,
    /// `use` of an entry for all calls.
    choice: &'static str,
    /// Launches of which each must be among those of a case.
    ran: &'static [Ran],
    /// Kernels of which none may be among them: what the lever makes inside another.
    absent: &'static [&'static str],
    /// Its calls.
    calls: fn(Laws) -> Vec<Case<Cuda>>,
    /// Cases of the suite, by name, which run too; every other one of them.
    suite: fn(&str) -> bool,
}

/// A launch, as far as it tells that a lever was obeyed.
struct Ran {
    kernel: &'static str,
    cluster: Option<u32>,
    grid_x: Option<u32>,
    grid_z: Option<u32>,
    /// A constant that the kernel was compiled with.
    constant: Option<(&'static str, usize)>,
}

const fn ran(kernel: &'static str) -> Ran {
    Ran { kernel, cluster: None, grid_x: None, grid_z: None, constant: None }
}

impl Ran {
    const fn cluster(self, of: u32) -> Self {
        Ran { cluster: Some(of), ..self }
    }

    const fn grid_x(self, of: u32) -> Self {
        Ran { grid_x: Some(of), ..self }
    }

    const fn grid_z(self, of: u32) -> Self {
        Ran { grid_z: Some(of), ..self }
    }

    const fn with(self, constant: &'static str, value: usize) -> Self {
        Ran { constant: Some((constant, value)), ..self }
    }

    fn is(&self, launch: &Launched) -> bool {
        self.kernel == launch.kernel
            && self.cluster.is_none_or(|of| of == launch.cluster)
            && self.grid_x.is_none_or(|of| of == launch.grid[0])
            && self.grid_z.is_none_or(|of| of == launch.grid[2])
            && self.constant.is_none_or(|of| launch.constants.contains(&of))
    }

    fn say(&self) -> String {
        let sizes = [("cluster", self.cluster), ("x", self.grid_x), ("z", self.grid_z)];
        let sizes = sizes.into_iter().filter_map(|(of, size)| size.map(|size| (of, size as usize)));
        let sizes = sizes.chain(self.constant).map(|(of, size)| format!(" {of}={size}"));
        sizes.fold(self.kernel.to_owned(), |name, size| name + &size)
    }
}

const fn lever(
    name: &'static str,
    [operator, choice]: [&'static str; 2],
    ran: &'static [Ran],
    calls: fn(Laws) -> Vec<Case<Cuda>>,
) -> Lever {
    Lever { name, operator, choice, ran, absent: &[], calls, suite: |_| false }
}

impl Lever {
    const fn and(self, suite: fn(&str) -> bool) -> Self {
        Lever { suite, ..self }
    }

    const fn without(self, absent: &'static [&'static str]) -> Self {
        Lever { absent, ..self }
    }
}

fn dense_suite(name: &str) -> bool {
    name.starts_with("lora_linear/bf16/")
}

/// But those of many experts, which are about what the heuristic chooses.
fn experts_suite(name: &str) -> bool {
    name.starts_with("fused_moe_lora/bf16/") && !name.contains("h=16,i=8,")
}

/// Rows of whole 16 bytes, routing weights on outputs.
fn plain_experts_suite(name: &str) -> bool {
    experts_suite(name)
        && !name.contains("on_input")
        && !["i=4,", "i=17,"].iter().any(|of| name.contains(of))
}

const GATE_UP: Ran = ran("moe_prefill_mma_gate_up");
const DOWN: Ran = ran("moe_prefill_mma_down");

const LEVERS: &[Lever] = &[
    // Dense products.
    lever(
        "stream",
        ["linear", r#"{"path": "stream"}"#],
        &[ran("linear_stream_16")],
        calls::dense_few,
    ),
    lever(
        "cluster,parts=1",
        ["linear", r#"{"path": "cluster", "parts": 1}"#],
        &[ran("linear_cluster").cluster(1)],
        calls::dense_cluster,
    ),
    lever(
        "cluster,parts=3",
        ["linear", r#"{"path": "cluster", "parts": 3}"#],
        &[ran("linear_cluster").cluster(3)],
        calls::dense_cluster,
    ),
    // x comes with the weights.
    lever(
        "cluster,streams",
        ["linear", r#"{"path": "cluster", "parts": 1}"#],
        &[ran("dense_shrink"), ran("linear_cluster").cluster(1)],
        calls::dense_streams,
    ),
    // Enough tiles to make the shrunk rows in the product.
    lever(
        "cluster,inside",
        ["linear", r#"{"path": "cluster", "parts": 2}"#],
        &[ran("linear_cluster").cluster(2)],
        calls::dense_inside,
    )
    .without(&["dense_shrink", "dense_shrink_many"]),
    // Blocks that do not run at once cannot wait for each other's shrunk rows.
    lever(
        "cluster,in_turns",
        ["linear", r#"{"path": "cluster", "parts": 3}"#],
        &[ran("dense_shrink"), ran("linear_cluster").cluster(3)],
        calls::dense_in_turns,
    ),
    // The deltas are one part more.
    lever(
        "narrow,split_k=2",
        ["linear", r#"{"path": "narrow", "parts": 2}"#],
        &[ran("linear_narrow").cluster(3)],
        calls::dense,
    ),
    lever(
        "wide",
        ["linear", r#"{"path": "wide"}"#],
        &[ran("linear_wide").cluster(1)],
        calls::dense,
    )
    .and(dense_suite),
    lever(
        "wide,split_k=3",
        ["linear", r#"{"path": "wide", "parts": 3}"#],
        &[ran("linear_wide").cluster(4)],
        calls::dense,
    ),
    lever(
        "narrow,group=2",
        ["linear", r#"{"path": "narrow", "group": 2}"#],
        &[ran("linear_narrow").cluster(1)],
        calls::dense,
    )
    .and(dense_suite),
    lever(
        "narrow,even_k",
        ["linear", r#"{"path": "narrow", "even_k": true}"#],
        &[ran("linear_narrow").with("kEvenK", 1)],
        calls::dense,
    ),
    lever(
        "narrow,deltas_apart",
        ["linear", r#"{"path": "narrow", "parts": 2, "deltas": "apart"}"#],
        &[ran("linear_narrow").cluster(2), ran("linear_finish")],
        calls::dense,
    ),
    lever(
        "narrow,atomic",
        ["linear", r#"{"path": "narrow", "parts": 2, "deltas": "apart", "order": "atomic"}"#],
        &[ran("linear_clear"), ran("linear_narrow").cluster(1).grid_x(2), ran("linear_finish")],
        calls::dense,
    ),
    lever(
        "warpgroups",
        ["linear", r#"{"path": "warpgroups"}"#],
        &[ran("dense_shrink_group"), ran("linear_group_slim").cluster(2)],
        calls::dense_many,
    ),
    lever(
        "warpgroups,deep",
        ["linear", r#"{"path": "warpgroups"}"#],
        &[ran("dense_shrink_group").cluster(8), ran("linear_group_slim").cluster(2)],
        calls::dense_deep,
    ),
    lever(
        "warpgroups,flat",
        ["linear", r#"{"path": "warpgroups"}"#],
        &[ran("linear_group_flat").cluster(2)],
        calls::dense_flat,
    ),
    lever(
        "warpgroups,square",
        ["linear", r#"{"path": "warpgroups"}"#],
        &[ran("linear_group_square").cluster(2)],
        calls::dense_square,
    ),
    lever(
        "warpgroups,large",
        ["linear", r#"{"path": "warpgroups"}"#],
        &[ran("linear_group_large").cluster(2)],
        calls::dense_large,
    ),
    lever(
        "warpgroups,f32",
        ["linear", r#"{"path": "warpgroups"}"#],
        &[ran("dense_shrink_group"), ran("linear_group_slim").cluster(2)],
        calls::dense_many_f32,
    ),
    lever(
        "library",
        ["linear", r#"{"path": "library"}"#],
        &[ran("cublasLtMatmul"), ran("linear_finish")],
        calls::dense,
    ),
    lever(
        "library,one_slice",
        ["linear", r#"{"path": "library"}"#],
        &[ran("cublasLtMatmul"), ran("linear_finish")],
        calls::dense_one_slice,
    ),
    lever(
        "library,f32",
        ["linear", r#"{"path": "library"}"#],
        &[ran("cublasLtMatmul"), ran("linear_finish")],
        calls::dense_f32,
    ),
    lever(
        "shrink=32x2",
        ["lora_linear", r#"{"rank_rows": 32, "rank_parts": 2}"#],
        &[ran("dense_shrink").grid_z(2)],
        calls::dense,
    ),
    lever(
        "shrink=8x3",
        ["lora_linear", r#"{"rank_rows": 8, "rank_parts": 3}"#],
        &[ran("dense_shrink").grid_z(3)],
        calls::dense,
    ),
    lever(
        "split_k=2,ordered",
        ["lora_shrink", r#"{"parts": 2, "order": "ordered"}"#],
        &[ran("lora_shrink"), ran("lora_shrink_sum")],
        calls::exact,
    ),
    lever(
        "split_k=2,atomic",
        ["lora_shrink", r#"{"parts": 2, "order": "atomic"}"#],
        &[ran("lora_shrink_clear"), ran("lora_shrink")],
        calls::exact,
    ),
    // Experts.
    lever(
        "stream,pass=8",
        ["fused_moe", r#"{"path": "stream", "pass": 8}"#],
        &[ran("stream_gate_up_lora_8"), ran("stream_down_lora_8")],
        calls::experts_eight,
    ),
    lever(
        "stream,pass=16",
        ["fused_moe", r#"{"path": "stream", "pass": 16}"#],
        &[ran("stream_gate_up_lora_16"), ran("stream_down_lora_16")],
        calls::experts_eight,
    ),
    lever(
        "stream,pieces=1",
        ["fused_moe", r#"{"path": "stream", "gate_up_pieces": 1}"#],
        &[ran("stream_gate_up_lora_8").with("kStreamPairs", 1)],
        calls::experts_eight,
    ),
    lever(
        "warpgroups",
        ["fused_moe", r#"{"path": "warpgroups"}"#],
        &[ran("moe_prefill_few_gate_up"), ran("moe_prefill_few_down")],
        calls::experts,
    ),
    lever("warps", ["fused_moe", r#"{"path": "warps"}"#], &[GATE_UP, DOWN], calls::experts)
        .and(plain_experts_suite),
    lever(
        "warps,even_k",
        ["fused_moe", r#"{"path": "warps", "even_k": true}"#],
        &[GATE_UP.with("kEvenK", 1), DOWN.with("kEvenK", 1)],
        calls::experts,
    ),
    lever(
        "warps,32x4",
        ["fused_moe", r#"{"path": "warps", "tile_tokens": 32, "stages": 4}"#],
        &[GATE_UP.with("kMmaTokens", 32), DOWN.with("kMmaStages", 4)],
        calls::experts,
    ),
    lever(
        "warps,128x3",
        ["fused_moe", r#"{"path": "warps", "tile_tokens": 128, "stages": 3}"#],
        &[GATE_UP.with("kMmaTokens", 128), DOWN.with("kMmaTokens", 128)],
        calls::experts,
    ),
    lever(
        "deltas_inside",
        ["fused_moe", r#"{"path": "general", "deltas": "inside"}"#],
        &[ran("moe_gate_up_lora"), ran("moe_down_lora")],
        calls::experts,
    ),
    lever(
        "deltas_apart",
        ["fused_moe", r#"{"path": "general", "deltas": "apart"}"#],
        &[ran("moe_gate_up_lora"), ran("moe_down"), ran("moe_down_delta")],
        calls::experts,
    )
    .and(experts_suite),
    // Routing and attention.
    lever("few", ["moe_route", r#"{"path": "few"}"#], &[ran("route_few")], calls::routes_some),
    lever(
        "sort,blocks=1",
        ["moe_route", r#"{"path": "sort", "blocks": 1}"#],
        &[ran("route_sort").cluster(1)],
        calls::routes,
    ),
    lever(
        "sort,blocks=4",
        ["moe_route", r#"{"path": "sort", "blocks": 4}"#],
        &[ran("route_sort").cluster(4)],
        calls::routes,
    ),
    lever(
        "choose,blocks=16",
        ["moe_route", r#"{"path": "choose", "blocks": 16}"#],
        &[ran("route_choose"), ran("route_sort").cluster(16)],
        calls::routes,
    ),
    lever(
        "split,splits=1",
        ["paged_attention", r#"{"path": "split", "splits": 1}"#],
        &[ran("attention_split_64").cluster(1)],
        calls::attention_many,
    ),
    lever(
        "split,splits=3",
        ["paged_attention", r#"{"path": "split", "splits": 3}"#],
        &[ran("attention_split_64").cluster(3)],
        calls::attention_many,
    ),
    lever(
        "attention,warpgroups",
        ["paged_attention", r#"{"path": "warpgroups"}"#],
        &[ran("attention_group_64")],
        calls::attention_few,
    ),
    lever(
        "attention,flash",
        ["paged_attention", r#"{"path": "flash"}"#],
        &[ran("attention_flash_64")],
        calls::attention,
    ),
];

impl Lever {
    fn tuning(&self) -> Tuning {
        let Lever { operator, choice, .. } = self;
        let entry = format!(r#"{{"when": {{}}, "use": {choice}}}"#);
        let text = format!(r#"{{"gpu": "any", "operator": "{operator}", "entries": [{entry}]}}"#);
        let mut tuning = Tuning::default();
        tuning.put_first(AnyFile::parse(&text).expect("the lists above are sound"));
        tuning
    }

    /// Whether its kernels ran, and none that it does without.
    fn obeyed(&self, launches: &[Launched]) -> Result<(), Failure> {
        let missing = self.ran.iter().find(|ran| !launches.iter().any(|launch| ran.is(launch)));
        let extra = launches.iter().find(|launch| self.absent.contains(&launch.kernel));
        let fault = match (missing, extra) {
            (None, None) => return Ok(()),
            (Some(missing), _) => format!("{} did not run", missing.say()),
            (None, Some(extra)) => format!("{} ran too", extra.kernel),
        };
        let mut seen: Vec<String> = launches.iter().map(|launch| format!("{launch:?}")).collect();
        seen.dedup();
        Err(Failure::Wrong(format!("{fault}; what ran: {}", seen.join(", "))))
    }

    fn cases(&'static self, device: &Cuda) -> Vec<Case<Cuda>> {
        let tuning = Arc::new(self.tuning());
        // Sums that are added as they come have other bits each time.
        let laws = if self.choice.contains("atomic") { Laws::AnyOrder } else { Laws::Bitwise };
        let suite = cases::all(device).into_iter().filter(|case| (self.suite)(&case.name));
        (self.calls)(laws)
            .into_iter()
            .chain(suite.step_by(2))
            .map(|Case { name, run }| {
                let tuning = tuning.clone();
                let run = move |device: &Cuda, seed| {
                    let (device, launches) = device.with_tuning((*tuning).clone()).watched();
                    run(&device, seed)?;
                    self.obeyed(&launches.all())
                };
                Case { name: format!("{}/{name}", self.name), run: Box::new(run) }
            })
            .collect()
    }
}

/// A choice that takes none of its calls: what looks at launches must notice.
static UNFIT: Lever =
    lever("unfit", ["linear", r#"{"path": "stream"}"#], &[ran("linear_stream_16")], calls::dense);

/// The cases of every lever, and that one which is not obeyed fails them.
pub fn cases(device: &Cuda) -> Vec<Case<Cuda>> {
    let run = |device: &Cuda, seed| {
        let passed = UNFIT.cases(device).into_iter().find(|case| (case.run)(device, seed).is_ok());
        match passed {
            None => Ok(()),
            Some(case) => Err(Failure::Wrong(format!("{} passed", case.name))),
        }
    };
    let unfit =
        Case { name: "levers/one_that_is_passed_over_fails".to_owned(), run: Box::new(run) };
    LEVERS.iter().flat_map(|lever| lever.cases(device)).chain([unfit]).collect()
}
