//! Pageable bytes on their way to the device, while a model is loaded.
//!
//! The driver takes such bytes too, but copies them into page-locked memory of its own by one thread, a tenth of what
//! the bus moves. Here all threads copy, into one half while the other is on the bus.

use std::sync::{Arc, Mutex, PoisonError};

use amphora_hal::Result;
use rayon::prelude::*;

use crate::driver::{Context, DeviceMemory, Event, Part, PinnedMemory, Stream};

/// Bytes of one half: enough that starting a copy costs little beside it.
const HALF: usize = 8 << 20;
/// Bytes that a thread copies at a time.
const SHARE: usize = 1 << 20;

/// The two halves, from the first bytes that need them until [`Staging::release`].
#[derive(Debug, Default)]
pub(super) struct Staging(Mutex<Option<[PinnedMemory; 2]>>);

impl Staging {
    /// Copies `bytes` into `memory` from byte `at` on, and waits until they are there.
    ///
    /// # Panics
    /// The bytes leave `memory`: a bug of the caller, who has checked the span by then.
    pub(super) fn bring(
        &self,
        context: &Arc<Context>,
        stream: &mut Stream,
        bytes: &[u8],
        (memory, at): (&DeviceMemory, usize),
    ) -> Result<()> {
        if bytes.len() < SHARE {
            return stream.upload_now(bytes, Part::new(memory, at, bytes.len()));
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut halves = match kept.take() {
            Some(halves) => halves,
            None => [PinnedMemory::zeroed(context, HALF)?, PinnedMemory::zeroed(context, HALF)?],
        };
        let sent = send(stream, bytes, &mut halves, (memory, at));
        let rest = stream.synchronize();
        match rest {
            Ok(()) => *kept = Some(halves),
            // The copy engine may read them still.
            Err(_) => std::mem::forget(halves),
        }
        sent.and(rest)
    }

    /// Gives the halves back.
    pub(super) fn release(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Puts copies of all `bytes` on the stream, half by half.
fn send(
    stream: &mut Stream,
    bytes: &[u8],
    halves: &mut [PinnedMemory; 2],
    (memory, at): (&DeviceMemory, usize),
) -> Result<()> {
    let mut passed: [Option<Event>; 2] = [None, None];
    for (index, piece) in bytes.chunks(HALF).enumerate() {
        let (half, passed) = (&mut halves[index % 2], &mut passed[index % 2]);
        if let Some(event) = passed.take() {
            event.synchronize()?;
        }
        let into = half.bytes_mut()[..piece.len()].par_chunks_mut(SHARE);
        into.zip(piece.par_chunks(SHARE)).for_each(|(to, from)| to.copy_from_slice(from));
        stream.upload(half, 0, Part::new(memory, at + index * HALF, piece.len()))?;
        *passed = Some(stream.record()?);
    }
    Ok(())
}
