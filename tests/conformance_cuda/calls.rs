//! Calls for levers: small, and such that the heuristic of an H200 chooses other kernels than the levers do.

use amphora_backend_cuda::Cuda;
use amphora_hal::ops::{Combine, Mask};
use amphora_hal::{Caps, DType, Device};
use amphora_tests::cases::fused_moe::{HostMoe, MoeSpec, Touch as MoeTouch};
use amphora_tests::cases::linear::LinearSpec;
use amphora_tests::cases::lora_linear::{Cut, HostLoraLinear, LoraLinearSpec, Touch};
use amphora_tests::cases::moe_route::{HostMoeRoute, Logits, RouteSpec};
use amphora_tests::cases::paged_attention::{AttentionSpec, HostAttention};
use amphora_tests::harness::{Case, case, check};
use amphora_tests::laws::{
    Adapted, a_slot_takes_other_ranks_in_place, base_rows_of, each_adapter_alone,
    rows_without_numbers_stay_alone, used_workspace_does_not_show,
};
use amphora_tests::rng::Rng;

/// Laws that a lever keeps, beside being right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Laws {
    /// Rows have the bits that they have in other company.
    Bitwise,
    /// Sums are added as they come, so the last bits are any.
    AnyOrder,
}

/// A call that is held against its oracle, and whose rows keep the laws of adapters.
fn adapted<H: Adapted + 'static>(
    name: String,
    laws: Laws,
    make: impl Fn(&mut Rng, &Caps) -> H + 'static,
) -> Case<Cuda> {
    let purpose = name.clone();
    let run = move |device: &Cuda, seed| {
        let mut rng = Rng::new(seed, &purpose);
        let op = make(&mut rng, device.caps());
        check(device, &op)?;
        if laws == Laws::AnyOrder {
            return Ok(());
        }
        base_rows_of(device, &op, &mut rng)?;
        each_adapter_alone(device, &op)?;
        used_workspace_does_not_show(device, &op, &mut rng)?;
        a_slot_takes_other_ranks_in_place(device, &op, &mut rng)?;
        rows_without_numbers_stay_alone(device, &op, &mut rng)
    };
    Case { name, run: Box::new(run) }
}

/// All are held against their oracle, the first of them against the laws too, which take a dozen runs.
fn linears<const N: usize>(laws: Laws, specs: [LoraLinearSpec; N]) -> Vec<Case<Cuda>> {
    let make = |spec: LoraLinearSpec| {
        move |rng: &mut Rng, caps: &Caps| HostLoraLinear::random(rng, caps, spec)
    };
    let first = specs.iter().take(1).map(|&spec| adapted(spec.name(), laws, make(spec)));
    first.chain(specs.iter().skip(1).map(|&spec| case(spec.name(), make(spec)))).collect()
}

/// The same of experts.
fn moes<const N: usize>(laws: Laws, specs: [MoeSpec; N]) -> Vec<Case<Cuda>> {
    let make = |spec: MoeSpec| move |rng: &mut Rng, caps: &Caps| HostMoe::random(rng, caps, spec);
    let first = specs.iter().take(1).map(|&spec| adapted(spec.name(), laws, make(spec)));
    first.chain(specs.iter().skip(1).map(|&spec| case(spec.name(), make(spec)))).collect()
}

/// Projections of q, k and v with a bias.
fn qkv([tokens, k, n]: [usize; 3], rank: usize, slots: usize) -> LoraLinearSpec {
    let base = LinearSpec { bias: true, ..LinearSpec::new(tokens, k, n, DType::BF16) };
    let cut = Cut::Qkv;
    LoraLinearSpec { cut, touch: Touch::MixedRanks, ..LoraLinearSpec::new(base, rank, slots) }
}

/// Of rows that stream the weight, for passes of sixteen.
pub fn dense_few(laws: Laws) -> Vec<Case<Cuda>> {
    linears(laws, [qkv([9, 192, 96], 24, 5), qkv([16, 640, 264], 64, 3)])
}

/// Of rows that stream or go to clusters of one part or two.
pub fn dense_cluster(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = LoraLinearSpec { padding: 3, ..qkv([37, 640, 264], 64, 4) };
    linears(laws, [qkv([9, 192, 96], 24, 5), padded, qkv([64, 896, 96], 256, 2)])
}

/// Of rows that go to clusters; whole steps of k, outputs of whole 16 bytes.
pub fn dense(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = LoraLinearSpec { padding: 2, ..qkv([33, 192, 96], 24, 5) };
    let shared = LoraLinearSpec { touch: Touch::SharedA, ..qkv([62, 640, 264], 64, 3) };
    let whole = LoraLinearSpec { cut: Cut::Whole, ..qkv([20, 320, 136], 256, 2) };
    linears(laws, [padded, shared, whole])
}

/// Of more inputs than one block of a cluster holds.
pub fn dense_streams(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = LoraLinearSpec { padding: 3, ..qkv([37, 1608, 264], 64, 4) };
    linears(laws, [qkv([9, 1216, 2400], 24, 5), padded, qkv([64, 2880, 96], 256, 2)])
}

/// Of clusters whose blocks make the shrunk rows.
pub fn dense_inside(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = LoraLinearSpec { padding: 3, ..qkv([37, 640, 2400], 64, 4) };
    linears(laws, [qkv([9, 192, 1752], 24, 5), padded, qkv([64, 896, 1752], 256, 2)])
}

/// Of rows for tiles of warpgroup products, in one turn and in more, with ends of tiles.
pub fn dense_many(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = LoraLinearSpec { padding: 3, ..qkv([37, 640, 264], 64, 4) };
    let whole = LoraLinearSpec { cut: Cut::Whole, ..qkv([150, 520, 1032], 256, 5) };
    linears(laws, [qkv([140, 896, 1176], 40, 6), padded, whole])
}

/// Of more inputs than blocks of the shrink by warpgroup products hold.
pub fn dense_deep(laws: Laws) -> Vec<Case<Cuda>> {
    linears(laws, [qkv([40, 4104, 96], 24, 3)])
}

/// Of so many rows and outputs that other tiles of warpgroup products would take two turns on an H200.
fn one_turn(tokens: usize, n: usize) -> Vec<Case<Cuda>> {
    let spec = LoraLinearSpec { cut: Cut::Whole, ..qkv([tokens, 520, n], 40, 3) };
    let make = move |rng: &mut Rng, caps: &Caps| HostLoraLinear::random(rng, caps, spec);
    vec![case(spec.name(), make)]
}

/// Of outputs for tiles of 128 x 256.
pub fn dense_flat(_: Laws) -> Vec<Case<Cuda>> {
    one_turn(70, 25_400)
}

/// Of 256 x 160.
pub fn dense_square(_: Laws) -> Vec<Case<Cuda>> {
    one_turn(130, 17_000)
}

/// Of 256 x 192.
pub fn dense_large(_: Laws) -> Vec<Case<Cuda>> {
    one_turn(130, 21_200)
}

/// With outputs in f32.
pub fn dense_many_f32(laws: Laws) -> Vec<Case<Cuda>> {
    let mut wide = qkv([70, 640, 264], 64, 3);
    wide.base.out = DType::F32;
    linears(laws, [wide])
}

/// Of clusters that do not all run at once, three blocks each.
pub fn dense_in_turns(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = LoraLinearSpec { padding: 2, ..qkv([40, 192, 6552], 40, 3) };
    linears(laws, [qkv([9, 192, 6552], 24, 5), padded])
}

/// Of outputs in f32, where a library's sums can lie until they are finished.
pub fn dense_f32(laws: Laws) -> Vec<Case<Cuda>> {
    let [mut biased, mut bare] = [qkv([33, 192, 96], 24, 5), qkv([62, 640, 264], 64, 3)];
    (biased.base.out, bare.base.out, bare.base.bias) = (DType::F32, DType::F32, false);
    linears(laws, [bare, LoraLinearSpec { padding: 2, ..biased }])
}

/// Of one slice, wider than a tile of outputs, with ranks on both sides of 32: what a tile's other rows need must
/// not change how an adapter's are summed.
pub fn dense_one_slice(laws: Laws) -> Vec<Case<Cuda>> {
    linears(laws, [LoraLinearSpec { cut: Cut::Whole, ..qkv([70, 640, 264], 64, 4) }])
}

/// In f32.
pub fn exact(laws: Laws) -> Vec<Case<Cuda>> {
    let mut linear = qkv([33, 192, 96], 24, 5);
    (linear.base.dtype, linear.base.out) = (DType::F32, DType::F32);
    let moe = MoeSpec { hidden: 136, inner: 72, ..MoeSpec::new(19, 4, 2, DType::F32) };
    let moe = moe.lora(3, 40, MoeTouch::Ragged);
    linears(laws, [linear]).into_iter().chain(moes(laws, [moe])).collect()
}

/// Experts of widths that are streamed.
fn wide(tokens: usize, experts: usize, top_k: usize) -> MoeSpec {
    MoeSpec { hidden: 128, inner: 64, ..MoeSpec::new(tokens, experts, top_k, DType::BF16) }
}

/// Of tokens that are streamed eight at a time.
pub fn experts_eight(laws: Laws) -> Vec<Case<Cuda>> {
    let padded = MoeSpec { padding: 2, combine: Combine::Add, ..wide(6, 4, 3) };
    let ragged = wide(8, 4, 2).lora(9, 33, MoeTouch::Ragged);
    moes(laws, [padded.lora(3, 16, MoeTouch::All), ragged])
}

/// Of tokens that are streamed, and few for each expert.
pub fn experts(laws: Laws) -> Vec<Case<Cuda>> {
    let swiglu = MoeSpec { clamped: false, biases: false, padding: 3, ..wide(29, 16, 4) };
    let ragged = wide(41, 4, 2).lora(4, 70, MoeTouch::Ragged);
    moes(laws, [swiglu.lora(5, 32, MoeTouch::SharedA), ragged])
}

fn routings(specs: impl IntoIterator<Item = RouteSpec>) -> Vec<Case<Cuda>> {
    let make =
        |spec: RouteSpec| case(spec.name(), move |rng, caps| HostMoeRoute::random(rng, caps, spec));
    specs.into_iter().map(make).collect()
}

/// Of pairs that are sorted by eight blocks or compared.
pub fn routes(_: Laws) -> Vec<Case<Cuda>> {
    let ties = RouteSpec { logits: Logits::Ties, padding: 3, ..RouteSpec::new([70, 128, 8, 6]) };
    routings([RouteSpec::new([9, 8, 2, 3]), RouteSpec::new([33, 32, 4, 4]), ties])
}

/// Of pairs that are sorted, though few enough to be compared.
pub fn routes_some(_: Laws) -> Vec<Case<Cuda>> {
    let padded = RouteSpec { padding: 2, logits: Logits::Ties, ..RouteSpec::new([38, 8, 3, 3]) };
    routings([RouteSpec::new([20, 16, 4, 2]), padded])
}

fn attentions(specs: impl IntoIterator<Item = AttentionSpec>) -> Vec<Case<Cuda>> {
    let make = |spec: AttentionSpec| {
        case(spec.name(), move |rng, caps| HostAttention::random(rng, caps, spec.clone()))
    };
    specs.into_iter().map(make).collect()
}

fn attend(sequences: &[(usize, usize)], [heads, kv_heads]: [usize; 2]) -> AttentionSpec {
    AttentionSpec {
        sequences: sequences.to_vec(),
        padding: 2,
        heads,
        kv_heads,
        k_dim: 64,
        v_dim: 64,
        block_size: 16,
        mask: Mask::Causal,
        sinks: true,
        dtype: DType::BF16,
    }
}

/// Of rows that go by tiles, one of them over so many positions that three blocks have work.
pub fn attention_many(_: Laws) -> Vec<Case<Cuda>> {
    attentions([
        attend(&[(500, 1), (120, 20), (0, 50)], [16, 2]),
        attend(&[(390, 3), (20, 70)], [4, 2]),
    ])
}

/// Of rows whose positions are split.
pub fn attention_few(_: Laws) -> Vec<Case<Cuda>> {
    let few = attend(&[(31, 1), (200, 30), (0, 17)], [16, 2]);
    attentions([AttentionSpec { mask: Mask::Window(24), ..few.clone() }, few])
}

/// Of both.
pub fn attention(laws: Laws) -> Vec<Case<Cuda>> {
    attention_few(laws).into_iter().chain(attention_many(laws)).collect()
}
