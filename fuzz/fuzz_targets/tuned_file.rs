//! A file of tuning data: taken whole, and then written and read again the same, or refused in one line
//! that names a field. The first byte says whether it is read as another program's.
#![no_main]

use amphora_backend_cuda::tuning::{AnyFile, Limits, vllm};
use libfuzzer_sys::fuzz_target;

const KINDS: [vllm::Kind; 6] = [
    vllm::Kind::Shrink,
    vllm::Kind::Expand,
    vllm::Kind::GateUpShrink,
    vllm::Kind::DownShrink,
    vllm::Kind::ExpertExpand,
    vllm::Kind::Experts,
];

fuzz_target!(|data: &[u8]| {
    let Some((first, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let fault = match KINDS.get(usize::from(first.wrapping_sub(b'a'))) {
        Some(&kind) => match vllm::answer(kind, "a GPU", text) {
            Ok(answer) => {
                for file in answer.files {
                    assert_eq!(AnyFile::parse(&file.text()).as_ref(), Ok(&file));
                }
                None
            }
            Err(fault) => Some(fault),
        },
        None => match AnyFile::parse(text) {
            Ok(file) => {
                assert_eq!(AnyFile::parse(&file.text()).as_ref(), Ok(&file));
                for (shared, newer) in [(99 << 10, false), (227 << 10, true)] {
                    let limits = Limits { processors: 84, shared, overlap: newer, groups: newer };
                    if let Err(fault) = file.check_on(limits) {
                        assert!(fault.field.starts_with("entries["), "{fault}");
                    }
                }
                None
            }
            Err(fault) => Some(fault),
        },
    };
    if let Some(fault) = fault {
        assert!(!fault.field.is_empty(), "{fault}");
    }
});
