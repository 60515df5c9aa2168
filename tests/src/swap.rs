//! One captured graph, two adapters: the same replay gives A's answer, then, after the slot's rows
//! were written, B's, with no recapture. For backends that have graphs.

use std::sync::Arc;

use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{
    Backend, Bucket, Carver, Ctx, DType, Factor, HostBytes, HostData, HostFactor, HostPart,
    HostWeight, HostWeightMeta, LogitRows, LoraLayout, LoraRow, LoraShape, LoraSlice, LoraTable,
    OpBounds, OpKind, PlanArea, PlanBuilder, PlanLayout, PlanLimits, Pool, RankClass, Scheme,
    SequencePlan, SliceMeta, Slot, StreamRole, Tensor, Tokens,
};

use crate::rig::upload;

const K: usize = 40;
const N: usize = 24;
const RANK: usize = 5;
const CLASS: RankClass = RankClass::new(16);
/// Bytes between the blocks of two adapters in the arena.
const BLOCK: usize = 4096;

/// Small numbers that f32 holds exactly, so that sums have one value in any order.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + seed * 13) % 9) as f32 - 4.0).collect()
}

struct Adapter {
    a: Vec<f32>,
    b: Vec<f32>,
    scale: f32,
}

impl Adapter {
    fn new(seed: usize, scale: f32) -> Self {
        Adapter { a: numbers(seed, RANK * K), b: numbers(seed + 1, N * RANK), scale }
    }

    fn expected(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let mid: Vec<f32> = self.a.chunks(K).map(|row| dot(x, row)).collect();
        let delta = self.b.chunks(RANK).map(|row| self.scale * dot(&mid, row));
        let base = weight.chunks(K).map(|row| dot(x, row));
        base.zip(delta).map(|(b, d)| b + d).collect()
    }
}

fn row<B: Backend>(device: &B, stream: &mut B::Stream, of: &Tensor<B>, row: usize) -> Vec<f32> {
    let host = device.reserve_host(of.bytes()).expect("pinned");
    let host = device
        .download(stream, of, host)
        .map_err(|returned| returned.error)
        .and_then(|sent| sent.finish())
        .expect("downloaded");
    let all: &[f32] = bytemuck::cast_slice(host.bytes());
    all[row * N..(row + 1) * N].to_vec()
}

/// A captured graph takes the adapter that its slot holds now.
///
/// # Panics
/// It does not, or the device fails: this is a test's body. `device` is sealed by it.
pub fn one_graph_across_a_swap<B: Backend>(device: &B) {
    let mut buffers = Carver::<B>::new(device.reserve(Pool::Scratch, 1 << 20).expect("bytes"));
    let mut carve = |dims: &[usize], dtype| buffers.carve(dims, dtype).expect("counted");
    let bounds = OpBounds {
        op: Some(OpKind::LoraLinear),
        tokens: 2,
        k: K,
        n: N,
        rank: CLASS.get(),
        ..OpBounds::default()
    };
    let mut stream =
        device.stream(StreamRole::Compute, device.workspace(&bounds)).expect("a stream");

    // Weight, inputs, arena with both adapters' blocks, a table of one slot.
    let meta = HostWeightMeta { matrices: 1, n: N, k: K, scheme: Scheme::Dense(DType::F32) };
    let weights = numbers(3, N * K);
    let part =
        HostPart { n: N, data: HostData::RowMajor(DType::F32, bytemuck::cast_slice(&weights)) };
    let host_weight = HostWeight::new(meta, vec![part]).expect("complete");
    let packed = carve(&[device.packed_bytes(&meta).expect("dense")], DType::U8);
    let weight = device.pack(&mut stream, &host_weight, packed).expect("packed");
    let x = carve(&[2, K], DType::F32);
    let inputs = [numbers(5, K), numbers(6, K)];
    upload(device, &mut stream, &x, bytemuck::cast_slice(&inputs.concat()));
    let mut out = carve(&[2, N], DType::F32);

    let mut layout = LoraLayout::default();
    let slice = layout.push(SliceMeta { k: K, n: N, experts: 1 });
    let layout = Arc::new(layout);
    let arena = carve(&[4 * BLOCK], DType::U8);
    let words = LoraTable::<B>::row_bytes(&layout, 1) / 4;
    let table =
        LoraTable::new(arena, carve(&[words], DType::I32), layout, 1, DType::F32).expect("a table");
    let adapters = [Adapter::new(20, 0.5), Adapter::new(30, 2.0)];
    let mut blocks = vec![0u8; 4 * BLOCK];
    for (i, adapter) in adapters.iter().enumerate() {
        for (j, (factor, width, data)) in
            [(Factor::A, K, &adapter.a), (Factor::B, N, &adapter.b)].into_iter().enumerate()
        {
            let shape = LoraShape { factor, width, dtype: DType::F32 };
            let bytes = device.lora_block(shape, CLASS).expect("a class");
            let at = (2 * i + j) * BLOCK;
            let host = HostFactor { shape, class: CLASS, rank: RANK, data };
            device.pack_lora(&host, &mut blocks[at..at + bytes]).expect("packed");
        }
    }
    upload(device, &mut stream, table.arena(), &blocks);
    let unit = (BLOCK / amphora_hal::ARENA_UNIT) as u32;
    let rows = |i: usize| LoraRow {
        a: 2 * i as u32 * unit,
        b: (2 * i as u32 + 1) * unit,
        class: CLASS.get() as u32,
        scale: adapters[i].scale,
    };
    let show = |stream: &mut B::Stream, row: LoraRow| {
        let host = device.reserve_host(64).expect("pinned");
        table
            .write_slot(device, stream, host, Slot::new(0), &[row])
            .map_err(|returned| returned.error)
            .and_then(|sent| sent.finish())
            .expect("rows written");
    };

    // A plan: the first row uses the slot, the second none.
    let limits = PlanLimits {
        sequences: 2,
        tokens: 2,
        blocks_per_sequence: 1,
        block_size: 16,
        kv_blocks: 2,
        vocab: 8,
        positions: 16,
        slots: 1,
        tile_rows: device.caps().tile_rows,
        edits: 0,
    };
    let bucket = Bucket { tokens: 2, sequences: 2, logit_rows: 2 };
    let plan_layout = PlanLayout::new(&limits, bucket).expect("within limits");
    let area = PlanArea::new(carve(&[plan_layout.bytes()], DType::U8)).expect("bytes");
    let mut builder = PlanBuilder::new(&limits, bucket).expect("within limits");
    for (sequence, slot) in [(0, Some(Slot::new(0))), (1, None)] {
        builder
            .push(SequencePlan {
                sequence,
                slot,
                first_position: 0,
                tokens: Tokens::Prompt(&[1]),
                blocks: &[sequence as u32],
                copy: None,
                sample: None,
                edits: &[],
                logprobs: None,
                logits: LogitRows::None,
            })
            .expect("fits");
    }
    let host = device.reserve_host(plan_layout.bytes()).expect("pinned");
    let (plan, sent) = builder
        .upload(device, &mut stream, host, &area)
        .map_err(|returned| returned.error)
        .expect("uploaded");
    sent.finish().expect("passed");

    let slices = [LoraSlice { table: slice, out_offset: 0, out_stride: 1, len: N }];
    show(&mut stream, rows(0));
    let graph = device
        .capture(&mut stream, |stream| {
            LoraLinear {
                base: Linear { x: &x, weight: &weight, bias: None, out: &mut out },
                lora: &table,
                slices: &slices,
                segments: plan.segments(),
            }
            .run(&mut Ctx { device, stream })
        })
        .expect("captured");
    device.seal();

    let base = Adapter { scale: 0.0, ..Adapter::new(20, 0.0) };
    let before = device.counters();
    for i in [0, 1, 0] {
        show(&mut stream, rows(i));
        device.replay(&mut stream, &graph, &plan).expect("replayed");
        assert_eq!(
            row(device, &mut stream, &out, 0),
            adapters[i].expected(&inputs[0], &weights),
            "adapter {i}"
        );
        assert_eq!(
            row(device, &mut stream, &out, 1),
            base.expected(&inputs[1], &weights),
            "the row without an adapter"
        );
    }
    show(&mut stream, LoraRow::default());
    device.replay(&mut stream, &graph, &plan).expect("replayed");
    assert_eq!(
        row(device, &mut stream, &out, 0),
        base.expected(&inputs[0], &weights),
        "an empty slot"
    );
    let after = device.counters().since(&before);
    assert_eq!(
        (after.replays, after.launches, after.allocations, after.uploads),
        (4, 0, 0, 4),
        "a swap is one upload, and nothing is captured or reserved anew"
    );
}
