//! Where the time of a stretch goes: device events around it, or behind every launch of it.
//!
//! The pieces of a stretch are recorded as one graph with an event behind each, so that the host's pace
//! is no part of a time. A launch that may begin before the one in front has ended does not with an
//! event between them: pieces add up to more than the stretch takes.

use amphora_hal::{Detail, Error, Mark, OpKind, Part, Profile, Result};

use super::{Cuda, CudaStream};
use crate::driver::{Clock, Graph};

/// What has been put on a stream so far of a stretch whose pieces are timed.
#[derive(Debug)]
pub(crate) struct Watch {
    layer: Option<usize>,
    op: Option<OpKind>,
    begin: Clock,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Piece {
    op: OpKind,
    layer: Option<usize>,
    kernel: &'static str,
    end: Clock,
}

impl CudaStream {
    /// Notes a launch that was just put on the stream, if the stream's launches are timed.
    pub(crate) fn launched(&mut self, kernel: &'static str) -> Result<()> {
        let Some(watch) = &mut self.watch else { return Ok(()) };
        // Operators run between two marks; a launch outside is of no operator, and part of the next.
        let Some(op) = watch.op else { return Ok(()) };
        let end = self.raw.clock_node()?;
        watch.pieces.push(Piece { op, layer: watch.layer, kernel, end });
        Ok(())
    }

    pub(super) fn hear(&mut self, mark: Mark) {
        let Some(watch) = &mut self.watch else { return };
        match mark {
            Mark::Layer(layer) => watch.layer = layer,
            Mark::Begin(op) => watch.op = Some(op),
            Mark::End => watch.op = None,
        }
    }
}

impl Cuda {
    pub(super) fn profile_stretch(
        &self,
        stream: &mut CudaStream,
        detail: Detail,
        body: impl FnOnce(&mut CudaStream) -> Result<()>,
    ) -> Result<Profile> {
        stream.outside_capture("profile")?;
        match detail {
            Detail::Whole => {
                let begin = stream.raw.clock()?;
                body(stream)?;
                let end = stream.raw.clock()?;
                stream.raw.synchronize()?;
                Ok(Profile { whole: end.since(&begin)?, parts: Vec::new() })
            }
            Detail::Parts => {
                stream.capturing = true;
                let mut watch = None;
                let graph = Graph::capture(stream, |stream| {
                    let begin = stream.raw.clock_node()?;
                    stream.watch = Some(Watch { layer: None, op: None, begin, pieces: Vec::new() });
                    let put = body(stream);
                    watch = stream.watch.take();
                    put
                });
                stream.capturing = false;
                graph?.launch(&mut stream.raw)?;
                stream.raw.synchronize()?;
                let watch =
                    watch.ok_or_else(|| Error::invalid("profile", "nothing was recorded"))?;
                watch.profile()
            }
        }
    }
}

impl Watch {
    /// The times of pieces that have all passed.
    fn profile(&self) -> Result<Profile> {
        let mut before = &self.begin;
        let mut parts = Vec::with_capacity(self.pieces.len());
        for Piece { op, layer, kernel, end } in &self.pieces {
            let time = end.since(before)?;
            parts.push(Part { op: *op, layer: *layer, kernel, time });
            before = end;
        }
        Ok(Profile { whole: before.since(&self.begin)?, parts })
    }
}
