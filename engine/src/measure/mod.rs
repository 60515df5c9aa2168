//! Operators measured as a step runs them: recorded, with the step's plan and adapters, over copies of
//! their weights that no cache holds, replayed in turns with what they are compared to. For benchmarks
//! and for the search of tuning data.

pub mod attention;
pub mod dense;
pub mod experts;
mod pattern;

use std::time::{Duration, Instant};

use amphora_hal::{
    ARENA_UNIT, Backend, Bucket, Carver, DType, Factor, HostBytes, LogitRows, LoraRow, LoraShape,
    LoraTable, PlanArea, PlanBuilder, PlanLayout, PlanLimits, PlanView, Result, Returned,
    SequencePlan, Slot, Span, Tensor, Tokens,
};

pub use pattern::Pattern;
pub(crate) use pattern::fill;

/// The rank of every adapter.
pub const RANK: usize = 32;
/// alpha / r.
pub const SCALE: f32 = 2.0;

/// Positions of a block of the plans' cache.
const BLOCK: usize = 16;

/// Bytes that no cache of a device holds.
const UNCACHED: usize = 256 << 20;

/// Copies of so many bytes that are enough for none to come from a cache.
fn copies(bytes: usize) -> usize {
    UNCACHED.div_ceil(bytes).clamp(2, 32)
}

/// Bounds of a plan whose rows are sequences of one token each.
fn limits(tokens: usize, slots: usize, tile_rows: usize) -> PlanLimits {
    PlanLimits {
        sequences: tokens,
        tokens,
        blocks_per_sequence: 1,
        block_size: BLOCK,
        kv_blocks: tokens,
        vocab: 1,
        positions: BLOCK,
        slots,
        tile_rows,
        edits: 0,
    }
}

/// The bucket that is as large as `limits`.
fn bucket(limits: &PlanLimits) -> Bucket {
    let &PlanLimits { sequences, tokens, .. } = limits;
    Bucket { tokens, sequences, logit_rows: sequences }
}

/// Bytes that [`upload`] carves.
fn plan_bytes(limits: &PlanLimits) -> Result<usize> {
    Ok(PlanLayout::new(limits, bucket(limits))?.bytes() + 2 * amphora_hal::ALIGN)
}

/// A sequence's first tokens, of which nothing is drawn.
fn silent<'a>(sequence: usize, tokens: &'a [u32], blocks: &'a [u32]) -> SequencePlan<'a> {
    SequencePlan {
        sequence,
        slot: None,
        first_position: 0,
        tokens: Tokens::Prompt(tokens),
        blocks,
        copy: None,
        sample: None,
        edits: &[],
        logprobs: None,
        logits: LogitRows::None,
    }
}

/// Uploads a plan of these sequences.
fn upload<'a, B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    carver: &mut Carver<B>,
    limits: &PlanLimits,
    sequences: impl IntoIterator<Item = SequencePlan<'a>>,
) -> Result<PlanView<B>> {
    let mut builder = PlanBuilder::new(limits, bucket(limits))?;
    sequences.into_iter().try_for_each(|sequence| builder.push(sequence))?;
    let bytes = PlanLayout::new(limits, bucket(limits))?.bytes();
    let area = PlanArea::new(carver.carve(&[bytes], DType::U8)?)?;
    let host = device.reserve_host(bytes)?;
    let sent = builder.upload(device, stream, host, &area);
    let (view, sent) = sent.map_err(|r: Returned<_>| r.error)?;
    sent.finish()?;
    Ok(view)
}

/// Rows whose adapters are each in turn.
pub fn in_turn(rows: usize, slots: usize) -> Vec<Option<usize>> {
    (0..rows).map(|row| Some(row % slots)).collect()
}

/// The plans of one bucket of rows: with their adapters, and with none.
#[derive(Debug)]
pub struct Plans<B: Backend> {
    /// With the adapters.
    pub with: PlanView<B>,
    /// Nobody has one.
    pub without: PlanView<B>,
}

impl<B: Backend> Plans<B> {
    /// Bytes that [`Plans::new`] carves.
    ///
    /// # Errors
    /// More rows than a plan can have.
    pub fn bytes(device: &B, tokens: usize, slots: usize) -> Result<usize> {
        let limits = limits(tokens, slots, device.caps().tile_rows);
        Ok(2 * plan_bytes(&limits)?)
    }

    /// Uploads both; `of_rows` has the adapter of each row, of `slots` there are.
    ///
    /// # Errors
    /// The device's, or the carver has no room.
    pub fn new(
        (device, stream): (&B, &mut B::Stream),
        carver: &mut Carver<B>,
        of_rows: &[Option<usize>],
        slots: usize,
    ) -> Result<Self> {
        let limits = limits(of_rows.len(), slots, device.caps().tile_rows);
        let blocks: Vec<[u32; 1]> = (0..of_rows.len()).map(|row| [row as u32]).collect();
        let mut plan = |of: &dyn Fn(usize) -> Option<usize>| {
            let sequences = blocks.iter().enumerate().map(|(row, blocks)| {
                let slot = of(row).map(|slot| Slot::new(slot as u16));
                SequencePlan { slot, ..silent(row, &[0], blocks) }
            });
            upload((device, &mut *stream), carver, &limits, sequences)
        };
        Ok(Plans { with: plan(&|row| of_rows[row])?, without: plan(&|_| None)? })
    }
}

/// Carves a tensor and uploads its bytes.
pub(crate) fn place<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    carver: &mut Carver<B>,
    bytes: &[u8],
    (dims, dtype): (&[usize], DType),
) -> Result<Tensor<B>> {
    let tensor = carver.carve(dims, dtype)?;
    let mut host = device.reserve_host(bytes.len())?;
    host.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    let span = [Span::front(bytes.len())];
    let sent = device.upload(stream, host, &span, &mut tensor.clone());
    sent.map_err(|r: Returned<_>| r.error)?.finish()?;
    Ok(tensor)
}

/// The values of a bf16 or f16 tensor, which is then filled with what is no number.
pub(crate) fn take<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    tensor: &Tensor<B>,
) -> Result<Vec<f32>> {
    let bytes = tensor.bytes();
    let sent = device.download(stream, tensor, device.reserve_host(bytes)?);
    let mut host = sent.map_err(|r: Returned<_>| r.error)?.finish()?;
    let values = amphora_hal::widen(tensor.dtype(), &host.bytes()[..bytes])?;
    host.bytes_mut().fill(0xff);
    let sent = device.upload(stream, host, &[Span::front(bytes)], &mut tensor.clone());
    sent.map_err(|r: Returned<_>| r.error)?.finish()?;
    Ok(values)
}

/// Writes an adapter's rows; `at` has the bytes of blocks A and B in the arena by row.
pub(crate) fn write_rows<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    table: &LoraTable<B>,
    slot: usize,
    at: &[[usize; 2]],
) -> Result<()> {
    let row = |&[a, b]: &[usize; 2]| LoraRow {
        a: (a / ARENA_UNIT) as u32,
        b: (b / ARENA_UNIT) as u32,
        class: RANK as u32,
        scale: SCALE,
    };
    let rows: Vec<LoraRow> = at.iter().map(row).collect();
    let staging = device.reserve_host(size_of_val(rows.as_slice()))?;
    let sent = table.write_slot(device, stream, staging, Slot::new(slot as u16), &rows);
    sent.map_err(|r: Returned<_>| r.error)?.finish().map(|_| ())
}

/// Fails unless blocks are row-major numbers, as stretches of a pattern are copied.
pub(crate) fn row_major<B: Backend>(device: &B, widths: [usize; 2], dtype: DType) -> Result<()> {
    for (factor, width) in [(Factor::A, widths[0]), (Factor::B, widths[1])] {
        let class = device.caps().rank_class(RANK);
        let class = class.ok_or_else(|| amphora_hal::Error::invalid("measure", "no rank 32"))?;
        let bytes = device.lora_block(LoraShape { factor, width, dtype }, class)?;
        if class.get() != RANK || bytes != RANK * width * dtype.size() {
            let what = format!("a block of {width} takes {bytes} bytes");
            return Err(amphora_hal::Error::invalid("measure", what));
        }
    }
    Ok(())
}

/// How long a comparison may take.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Rounds in which each graph has its turn.
    pub rounds: usize,
    /// No round begins after so long, but three are always made.
    pub most: Duration,
    /// What a graph's turn takes at least, by up to 20 replays.
    pub turn: Duration,
    /// Before each turn the device is left idle so long.
    pub rest: Duration,
}

/// What a benchmark wants: one turn behind the other, so that a device with a limit of power comes to the
/// clock that it can keep.
pub const CAREFUL: Effort = Effort {
    rounds: 15,
    most: Duration::from_millis(1500),
    turn: Duration::from_millis(2),
    rest: Duration::ZERO,
};

/// Turns of a few milliseconds on an idle device, at the clock of a short run.
pub const SHORT: Effort = Effort { rounds: 9, rest: Duration::from_millis(20), ..CAREFUL };

/// Median microseconds of one of the `calls` calls in each graph, the graphs in turns.
///
/// # Errors
/// The device's.
pub fn times<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    plan: &PlanView<B>,
    (graphs, calls): (&[B::Graph], usize),
    effort: Effort,
) -> Result<Vec<f64>> {
    let mut replay = |graph: &B::Graph, count: usize| -> Result<Duration> {
        let begin = Instant::now();
        for _ in 0..count {
            device.replay(stream, graph, plan)?;
        }
        let event = device.record(stream)?;
        device.block_on(&event)?;
        Ok(begin.elapsed())
    };
    let mut counts = Vec::new();
    for graph in graphs {
        replay(graph, 1)?;
        let once = replay(graph, 1)?.as_secs_f64();
        counts.push(((effort.turn.as_secs_f64() / once) as usize).clamp(1, 20));
    }
    let mut samples = vec![Vec::new(); graphs.len()];
    let begin = Instant::now();
    for round in 0..effort.rounds {
        if round >= 3 && begin.elapsed() > effort.most {
            break;
        }
        for ((graph, &count), samples) in graphs.iter().zip(&counts).zip(&mut samples) {
            std::thread::sleep(effort.rest);
            samples.push(replay(graph, count)?.as_secs_f64() * 1e6 / (count * calls) as f64);
        }
    }
    let median = |mut samples: Vec<f64>| {
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    };
    Ok(samples.into_iter().map(median).collect())
}
