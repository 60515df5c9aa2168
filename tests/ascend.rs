//! What the Ascend backend shows on the host twin alone: one captured graph across an adapter swap, the vendor's
//! grouped product, and a tied head that is its embedding.
#![cfg(feature = "ascend-twin")]

use amphora_backend_ascend::{Ascend, bundled_twin};
use amphora_hal::{Backend, Ctx, DType, Device, DeviceConfig, Error, Pool, StreamRole};
use amphora_model::{Config, LoadOptions, LoadReport, Model, ModelFiles};
use amphora_tests::golden;

#[path = "ascend/grouped.rs"]
mod grouped;

fn twin() -> Ascend {
    let library = Some(bundled_twin().expect("Cargo builds the twin"));
    Ascend::open(&DeviceConfig { library, ..DeviceConfig::default() }).expect("the twin opens")
}

#[test]
fn a_captured_graph_takes_the_adapter_that_its_slot_holds_now() {
    amphora_tests::swap::one_graph_across_a_swap(&twin());
}

/// Another's memory is neither there when a device is opened nor counted as reserved when it is missed later.
#[test]
fn memory_that_others_took_is_not_ours() {
    const TAKEN: usize = 64 << 20;
    let (first, before) = (twin(), twin());
    let taken = first.reserve(Pool::Weights, TAKEN).expect("room");
    let after = twin();
    let total = after.caps().memory;
    assert!(after.memory().limit <= total - TAKEN, "{:?} of {total}", after.memory());
    // Others of this process may have a little, too: nobody has more than half.
    let wanted = before.memory().limit - TAKEN / 2;
    match before.reserve(Pool::KvCache, wanted) {
        Err(Error::OutOfMemory { pool: Pool::KvCache, wanted: told, left }) => {
            assert_eq!(told, wanted);
            assert!((total / 2..=total - TAKEN).contains(&left), "{left} of {total}");
            let report = before.memory();
            assert_eq!((report.limit, report.total()), (left, 0));
        }
        other => panic!("{other:?}"),
    }
    drop(taken);
}

/// What loading a tied model takes on a device.
fn loaded<B: Backend>(device: &B) -> LoadReport {
    let files = ModelFiles::open(&golden::folder().join("models/llama")).expect("stored");
    let config = Config::read(&files).expect("sound");
    assert!(config.tied_embeddings);
    let options = LoadOptions { dtype: DType::F32, positions: 64 };
    let (told, faults) = amphora_model::examine(&files, &config, options, device);
    assert!(faults.is_empty(), "{faults:?}");
    let mut stream = device.stream(StreamRole::Compute, 0).expect("a stream");
    let cx = &mut Ctx { device, stream: &mut stream };
    let model = Model::load(&files, config, options, cx, &mut |_| {}).expect("room");
    assert_eq!(*model.report(), told, "what was told before");
    assert!(device.memory().pool(Pool::Weights) >= told.device_bytes);
    told
}

/// 400 rows of 64 numbers in f32, which the CPU packs and a device that packs rows as they are has once.
#[cfg(feature = "cpu")]
#[test]
fn a_tied_head_is_its_embedding_where_rows_are_packed_as_they_are() {
    let cpu = amphora_backend_cpu::Cpu::open(&DeviceConfig::default()).expect("the host");
    let (twice, once) = (loaded(&cpu), loaded(&twin()));
    assert_eq!((twice.repeated_bytes, once.repeated_bytes), (400 * 64 * 4, 0));
    assert_eq!(twice.device_bytes - once.device_bytes, 400 * 64 * 4);
}
