//! The clock beside operators that a profile asks for.

use std::time::Instant;

use amphora_hal::{Detail, Mark, OpKind, Part, Profile, Result};

use crate::CpuStream;

/// What has run so far of a stretch that is profiled.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    layer: Option<usize>,
    running: Option<(OpKind, Instant)>,
    parts: Vec<Part>,
}

impl Watch {
    pub(crate) fn hear(&mut self, mark: Mark) {
        match mark {
            Mark::Layer(layer) => self.layer = layer,
            Mark::Begin(op) => self.running = Some((op, Instant::now())),
            Mark::End => {
                if let Some((op, began)) = self.running.take() {
                    let (layer, time) = (self.layer, began.elapsed());
                    self.parts.push(Part { op, layer, kernel: "plain", time });
                }
            }
        }
    }
}

/// Runs `body` beside a clock.
pub(crate) fn profile(
    stream: &mut CpuStream,
    detail: Detail,
    body: impl FnOnce(&mut CpuStream) -> Result<()>,
) -> Result<Profile> {
    stream.watch = (detail == Detail::Parts).then(Watch::default);
    let began = Instant::now();
    let result = body(stream);
    let whole = began.elapsed();
    let parts = stream.watch.take().map_or_else(Vec::new, |watch| watch.parts);
    result.map(|()| Profile { whole, parts })
}
