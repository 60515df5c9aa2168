//! Cases of the device itself: memory, order, transfers, seal, counters. Each opens a device of its
//! own where it would disturb others.

use std::sync::OnceLock;

use amphora_hal::{
    Backend, Carver, Counters, DType, DeviceConfig, Error, HostBytes, Pool, Result, Returned, Span,
    StreamRole, Tensor, Weight,
};

use crate::fixtures::HostMatrices;
use crate::harness::{Case, Failure};
use crate::host::HostTensor;
use crate::rng::Rng;

type Outcome = std::result::Result<(), Failure>;

fn wrong<T>(what: impl Into<String>) -> std::result::Result<T, Failure> {
    Err(Failure::Wrong(what.into()))
}

fn expect(holds: bool, what: &str) -> Outcome {
    if holds { Ok(()) } else { wrong(what) }
}

/// How the suite opened its device; cases that open one of their own do it the same way.
pub static CONFIG: OnceLock<DeviceConfig> = OnceLock::new();

fn open<B: Backend>(memory_limit: Option<usize>) -> Result<B> {
    B::open(&DeviceConfig { memory_limit, ..CONFIG.get().cloned().unwrap_or_default() })
}

fn bytes<B: Backend>(device: &B, pool: Pool, len: usize) -> Result<Tensor<B>> {
    Carver::new(device.reserve(pool, len)?).carve(&[len], DType::U8)
}

fn host<B: Backend>(device: &B, content: &[u8]) -> Result<B::Host> {
    let mut host = device.reserve_host(content.len())?;
    host.bytes_mut()[..content.len()].copy_from_slice(content);
    Ok(host)
}

fn read<B: Backend>(device: &B, stream: &mut B::Stream, from: &Tensor<B>) -> Result<Vec<u8>> {
    let host = device.reserve_host(from.bytes())?;
    let host = device.download(stream, from, host)?.finish()?;
    Ok(host.bytes()[..from.bytes()].to_vec())
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.bits() as u8).collect()
}

fn reserved_bytes_are_zeroed_and_aligned<B: Backend>(device: &B, _seed: u64) -> Outcome {
    let mut stream = device.stream(StreamRole::Compute, 0)?;
    // Twice: the second time the allocator may hand out what the first wrote.
    for _ in 0..2 {
        let mut tensor = bytes(device, Pool::Scratch, 70_001)?;
        expect(
            read(device, &mut stream, &tensor)?.iter().all(|&b| b == 0),
            "bytes are not zeroed",
        )?;
        let full = host(device, &vec![0xA5; 70_001])?;
        device.upload(&mut stream, full, &[Span::front(70_001)], &mut tensor)?.finish()?;
    }
    let host = device.reserve_host(33)?;
    expect(
        host.bytes().len() >= 33 && host.bytes().iter().all(|&b| b == 0),
        "host bytes are not zeroed",
    )
}

fn memory_is_reported_by_pool_and_limited<B: Backend>(_: &B, _seed: u64) -> Outcome {
    let device: B = open(Some(1 << 20))?;
    let before = device.memory();
    expect(before.limit <= 1 << 20, "the limit is not reported")?;
    let first = device.reserve(Pool::Weights, 300_000)?;
    let second = device.reserve(Pool::KvCache, 100_000)?;
    let during = device.memory();
    expect(
        during.pool(Pool::Weights) - before.pool(Pool::Weights) >= 300_000
            && during.pool(Pool::KvCache) - before.pool(Pool::KvCache) >= 100_000
            && during.pool(Pool::Adapters) == before.pool(Pool::Adapters),
        "pools do not show what was reserved from them",
    )?;
    match device.reserve(Pool::Adapters, 1 << 20) {
        Err(Error::OutOfMemory { pool: Pool::Adapters, wanted, left }) => {
            expect(wanted == 1 << 20 && left < 1 << 20, "OutOfMemory says other numbers")?;
        }
        other => return wrong(format!("a reservation beyond the limit gave {other:?}")),
    }
    drop((first, second));
    expect(device.memory() == before, "dropped bytes are reserved still")?;
    device.reserve(Pool::Adapters, 700_000)?;
    Ok(())
}

fn sealed_devices_reserve_nothing<B: Backend>(_: &B, _seed: u64) -> Outcome {
    let device: B = open(None)?;
    let mut stream = device.stream(StreamRole::Compute, 64)?;
    let tensor = bytes(&device, Pool::Scratch, 512)?;
    device.seal();
    let sealed = |result: Result<()>| matches!(result, Err(Error::Sealed { .. }));
    for pool in Pool::ALL {
        expect(sealed(device.reserve(pool, 64).map(drop)), "a sealed pool gave bytes")?;
    }
    expect(sealed(device.stream(StreamRole::Copy, 64).map(drop)), "a sealed device made a stream")?;
    let allocations = device.counters().allocations;
    expect(read(&device, &mut stream, &tensor)?.len() == 512, "a download after sealing")?;
    expect(device.counters().allocations == allocations, "a download allocated on the device")
}

fn clones_are_the_same_device<B: Backend>(_: &B, _seed: u64) -> Outcome {
    let device: B = open(None)?;
    let clone = device.clone();
    let before = device.memory().pool(Pool::Scratch);
    let _kept = clone.reserve(Pool::Scratch, 4096)?;
    expect(device.memory().pool(Pool::Scratch) >= before + 4096, "a clone counts apart")?;
    clone.seal();
    expect(device.reserve(Pool::Scratch, 1).is_err(), "sealing a clone left the device open")
}

fn spans_land_where_they_should<B: Backend>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "spans");
    let mut stream = device.stream(StreamRole::Copy, 0)?;
    let mut tensor = bytes(device, Pool::Scratch, 5000)?;
    let (content, mut image) = (random(&mut rng, 3000), vec![0; 5000]);
    let mut spans = vec![Span { from: 2999, to: 4999, len: 1 }, Span { from: 7, to: 11, len: 0 }];
    for at in 0..12 {
        let len = rng.below(300);
        spans.push(Span { from: rng.below(3000 - len), to: at * 400 + rng.below(100), len });
    }
    for Span { from, to, len } in &spans {
        image[*to..to + len].copy_from_slice(&content[*from..from + len]);
    }
    let sent = device.upload(&mut stream, host(device, &content)?, &spans, &mut tensor)?;
    let back = sent.finish()?;
    expect(back.bytes()[..3000] == content[..], "the host buffer came back changed")?;
    expect(read(device, &mut stream, &tensor)? == image, "spans landed elsewhere")?;
    let part = tensor.narrow(0, 400, 1000)?;
    expect(read(device, &mut stream, &part)? == image[400..1400], "a part reads otherwise")
}

fn refused_transfers_give_the_buffer_back<B: Backend>(device: &B, _seed: u64) -> Outcome {
    let mut stream = device.stream(StreamRole::Copy, 0)?;
    let mut tensor = bytes(device, Pool::Scratch, 256)?;
    let before = device.counters();
    for span in [
        Span { from: 0, to: 200, len: 57 },
        Span { from: 1, to: 0, len: 100 },
        Span { from: usize::MAX, to: 0, len: 2 },
        Span { from: 0, to: usize::MAX, len: 2 },
    ] {
        let buffer = host(device, &[9; 100])?;
        match device.upload(&mut stream, buffer, &[Span::front(4), span], &mut tensor) {
            Err(Returned { host, error: Error::Invalid { .. } }) => {
                expect(host.bytes()[..100] == [9; 100], "the buffer came back changed")?;
            }
            Err(Returned { error, .. }) => return wrong(format!("{span:?} gave {error}")),
            Ok(_) => return wrong(format!("{span:?} was taken")),
        }
    }
    let small = host(device, &[9; 100])?;
    match device.download(&mut stream, &tensor, small) {
        Err(Returned { host, .. }) => {
            expect(host.bytes()[..100] == [9; 100], "it came back changed")?
        }
        Ok(_) => return wrong("a download into a smaller buffer was taken"),
    }
    expect(read(device, &mut stream, &tensor)? == [0; 256], "a refused upload wrote")?;
    let after = device.counters().since(&before);
    expect(after.uploads == 0 && after.downloads == 1, "refused transfers were counted")
}

fn strided_tensors_are_refused_by_transfers<B: Backend>(device: &B, _seed: u64) -> Outcome {
    let mut stream = device.stream(StreamRole::Copy, 0)?;
    let buffer = device.reserve(Pool::Scratch, 4096)?;
    let tensor = Carver::<B>::new(buffer).carve(&[8, 16], DType::F32)?;
    let mut part = tensor.narrow(1, 4, 8)?;
    let up = device.upload(&mut stream, host(device, &[1; 64])?, &[Span::front(64)], &mut part);
    expect(up.is_err(), "an upload into a strided tensor was taken")?;
    let down = device.download(&mut stream, &part, device.reserve_host(4096)?);
    expect(down.is_err(), "a download of a strided tensor was taken")
}

fn one_stream_keeps_program_order<B: Backend>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "order");
    let mut stream = device.stream(StreamRole::Compute, 0)?;
    let mut tensor = bytes(device, Pool::Scratch, 1 << 16)?;
    let (mut uploads, mut downloads) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let content = random(&mut rng, 1 << 16);
        let source = host(device, &content)?;
        uploads.push(device.upload(&mut stream, source, &[Span::front(1 << 16)], &mut tensor)?);
        let into = device.reserve_host(1 << 16)?;
        downloads.push((device.download(&mut stream, &tensor, into)?, content));
    }
    for (down, content) in downloads {
        expect(down.finish()?.bytes()[..1 << 16] == content[..], "a download saw another upload")?;
    }
    // The rest finish by being dropped.
    drop(uploads);
    Ok(())
}

fn streams_meet_through_events<B: Backend>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "events");
    let mut copy = device.stream(StreamRole::Copy, 0)?;
    let mut compute = device.stream(StreamRole::Compute, 0)?;
    let mut tensor = bytes(device, Pool::Scratch, 1 << 16)?;
    for _ in 0..8 {
        let content = random(&mut rng, 1 << 16);
        let source = host(device, &content)?;
        let sent = device.upload(&mut copy, source, &[Span::front(1 << 16)], &mut tensor)?;
        let event = device.record(&mut copy)?;
        device.wait(&mut compute, &event)?;
        let seen = read(device, &mut compute, &tensor)?;
        expect(seen == content, "a stream that waited saw older bytes")?;
        expect(
            device.is_done(&event)? && sent.is_done()?,
            "what lies before a seen copy is not done",
        )?;
        // The next upload must not overtake the download.
        let read = device.record(&mut compute)?;
        device.wait(&mut copy, &read)?;
        device.block_on(&read)?;
    }
    Ok(())
}

fn dropping_a_transfer_waits_for_it<B: Backend>(device: &B, seed: u64) -> Outcome {
    let content = random(&mut Rng::new(seed, "drop"), 1 << 20);
    let mut stream = device.stream(StreamRole::Copy, 0)?;
    let mut tensor = bytes(device, Pool::Scratch, 1 << 20)?;
    let source = host(device, &content)?;
    drop(device.upload(&mut stream, source, &[Span::front(1 << 20)], &mut tensor)?);
    expect(read(device, &mut stream, &tensor)? == content, "a dropped upload lost bytes")
}

fn counters_count_transfers<B: Backend>(_: &B, _seed: u64) -> Outcome {
    let device: B = open(None)?;
    let mut stream = device.stream(StreamRole::Copy, 0)?;
    let mut tensor = bytes(&device, Pool::Scratch, 1000)?;
    let source = host(&device, &[1; 600])?;
    let before = device.counters();
    let spans = [Span::front(100), Span { from: 100, to: 500, len: 50 }];
    let buffer = device.upload(&mut stream, source, &spans, &mut tensor)?.finish()?;
    let back = device.download(&mut stream, &tensor.narrow(0, 0, 600)?, buffer)?.finish()?;
    let Counters {
        uploads, upload_bytes, downloads, download_bytes, launches, allocations, ..
    } = device.counters().since(&before);
    let seen = (uploads, upload_bytes, downloads, download_bytes, launches, allocations);
    drop(back);
    if seen != (1, 150, 1, 600, 0, 0) {
        return wrong(format!("counters show {seen:?}"));
    }
    let _kept = device.reserve(Pool::Weights, 64)?;
    let reserved = device.counters().since(&before).allocations;
    expect(reserved == 1, "a reservation is not counted as one allocation")
}

fn facts_are_sound<B: Backend>(device: &B, _seed: u64) -> Outcome {
    let caps = device.caps();
    let classes: Vec<usize> = caps.rank_classes.iter().map(|class| class.get()).collect();
    expect(!classes.is_empty() && classes.is_sorted(), "rank classes do not ascend")?;
    expect(classes.last().is_some_and(|&last| last >= 256), "the largest class is below 256")?;
    expect(caps.rank_class(1).map(|c| c.get()) == classes.first().copied(), "rank 1 has no class")?;
    expect(
        caps.rank_class(classes[0]).is_some_and(|c| c.get() == classes[0]),
        "a class holds itself",
    )?;
    expect(caps.tile_rows > 0 && caps.memory > 0, "there are no rows or no memory")?;
    expect(!caps.dtypes.is_empty() && caps.dtypes.iter().all(|d| d.is_float()), "no compute type")
}

/// Where packing leaves rows as they are, a tensor of rows is a weight too, in its own memory.
fn rows_are_packed_as_the_facts_say<B: Backend>(device: &B, seed: u64) -> Outcome {
    if !device.caps().packs_rows {
        return Ok(());
    }
    let mut rng = Rng::new(seed, "rows");
    for &dtype in device.caps().dtypes {
        let mut stream = device.stream(StreamRole::Compute, 0)?;
        let matrix = HostMatrices::random(&mut rng, [1, 24, 40], dtype);
        let content = HostTensor::real(&[24, 40], dtype, &matrix.values).bytes;
        let into = bytes(device, Pool::Weights, device.packed_bytes(&matrix.meta())?)?;
        let packed =
            matrix.with_host_weight(|host| device.pack(&mut stream, host, into.clone()))?;
        let rows = Tensor::new(into.buffer().clone(), into.offset(), &[24, 40], dtype)?;
        let of_rows = Weight::of_rows(&rows)?;
        expect(read(device, &mut stream, packed.data())? == content, "rows are packed otherwise")?;
        expect(read(device, &mut stream, of_rows.data())? == content, "rows are not the weight's")?;
        let sizes =
            |weight: &Weight<B>| (weight.matrices(), weight.n(), weight.k(), weight.scheme());
        expect(sizes(&packed) == sizes(&of_rows), "a weight of rows has another form")?;
        let turned = rows.narrow(1, 0, 8)?;
        expect(Weight::of_rows(&turned).is_err(), "rows with gaps are no weight")?;
    }
    Ok(())
}

/// All cases.
pub fn cases<B: Backend>() -> Vec<Case<B>> {
    type Test<B> = fn(&B, u64) -> Outcome;
    let tests: [(&str, Test<B>); 14] = [
        ("facts_are_sound", facts_are_sound),
        ("rows_are_packed_as_the_facts_say", rows_are_packed_as_the_facts_say),
        ("reserved_bytes_are_zeroed_and_aligned", reserved_bytes_are_zeroed_and_aligned),
        ("memory_is_reported_by_pool_and_limited", memory_is_reported_by_pool_and_limited),
        ("sealed_devices_reserve_nothing", sealed_devices_reserve_nothing),
        ("clones_are_the_same_device", clones_are_the_same_device),
        ("spans_land_where_they_should", spans_land_where_they_should),
        ("refused_transfers_give_the_buffer_back", refused_transfers_give_the_buffer_back),
        ("strided_tensors_are_refused_by_transfers", strided_tensors_are_refused_by_transfers),
        ("one_stream_keeps_program_order", one_stream_keeps_program_order),
        ("streams_meet_through_events", streams_meet_through_events),
        ("dropping_a_transfer_waits_for_it", dropping_a_transfer_waits_for_it),
        ("counters_count_transfers", counters_count_transfers),
        (
            "a_capture_that_fails_leaves_the_stream_usable",
            a_capture_that_fails_leaves_the_stream_usable,
        ),
    ];
    let make =
        |(name, run): (&str, Test<B>)| Case { name: format!("device/{name}"), run: Box::new(run) };
    tests.into_iter().map(make).collect()
}

/// Without graphs the closure must not run at all, and the error must say why.
fn a_capture_that_fails_leaves_the_stream_usable<B: Backend>(device: &B, _seed: u64) -> Outcome {
    let mut stream = device.stream(StreamRole::Compute, 0)?;
    let tensor = bytes(device, Pool::Scratch, 64)?;
    let refused = Error::invalid("capture", "on purpose");
    let captured = device.capture(&mut stream, |_| Err(refused.clone())).map(drop);
    match captured.clone() {
        Err(error) if device.caps().graphs => expect(error == refused, "another error came back")?,
        Err(Error::Invalid { .. }) => {
            expect(captured != Err(refused), "the body ran without graphs")?
        }
        Err(error) => return wrong(format!("without graphs, capture gave {error}")),
        Ok(()) => return wrong("a failed capture gave a graph"),
    }
    expect(read(device, &mut stream, &tensor)? == [0; 64], "the stream is unusable afterwards")
}
