//! Transfers: pinned bytes move in, and come back when the event behind their copies has passed.

use amphora_hal::{Device, Error, HostBytes, InFlight, Result, Returned, Sent, Span};

use super::{Buffer, Event, PinnedMemory, Stream};

/// Dense bytes of a buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch<'a> {
    pub(crate) buffer: &'a Buffer,
    /// First byte in the buffer.
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl Stretch<'_> {
    fn check(&self, op: &'static str) -> Result<()> {
        use amphora_hal::DeviceBytes;
        let end = self.offset.checked_add(self.bytes);
        if end.is_some_and(|end| end <= self.buffer.len()) {
            return Ok(());
        }
        Err(Error::invalid(op, format!("{self:?} leaves its buffer")))
    }

    fn address(&self) -> usize {
        self.buffer.address() + self.offset
    }
}

/// Copies `spans` of `src` to `dst`, in stream order.
pub(crate) fn upload<D>(
    device: &D,
    stream: &mut Stream,
    (src, spans): (PinnedMemory, &[Span]),
    dst: Stretch<'_>,
) -> Sent<D>
where
    D: Device<Host = PinnedMemory, Event = Event>,
{
    let sound = stream
        .not_capturing("upload")
        .and_then(|()| Span::check_all(spans, src.bytes().len(), dst.bytes))
        .and_then(|()| dst.check("upload"));
    if let Err(error) = sound {
        return Err(Returned { host: src, error });
    }
    // SAFETY: the spans lie in both sides, as just checked. The buffer is in `sent`'s hands until the
    // event has passed; device memory waits for the device before it is freed.
    let copied = unsafe { src.upload(stream, spans, dst.address()) };
    sent(device, stream, src, copied)
}

/// Copies `src` to the front of `dst`, in stream order.
pub(crate) fn download<D>(
    device: &D,
    stream: &mut Stream,
    src: Stretch<'_>,
    dst: PinnedMemory,
) -> Sent<D>
where
    D: Device<Host = PinnedMemory, Event = Event>,
{
    let sound = stream
        .not_capturing("download")
        .and_then(|()| Span::check_all(&[Span::front(src.bytes)], dst.bytes().len(), src.bytes))
        .and_then(|()| src.check("download"));
    if let Err(error) = sound {
        return Err(Returned { host: dst, error });
    }
    // SAFETY: as in `upload`.
    let copied = unsafe { dst.download(stream, src.address(), src.bytes) };
    sent(device, stream, dst, copied)
}

/// The buffer in flight, behind an event; or, if something failed, the buffer back.
///
/// Copies may run all the same then, so the stream is drained first; if that fails too, nobody can
/// say any more when the copy engine is done, and the bytes are given up.
fn sent<D>(device: &D, stream: &mut Stream, host: PinnedMemory, copied: Result<()>) -> Sent<D>
where
    D: Device<Host = PinnedMemory, Event = Event>,
{
    match copied.and_then(|()| stream.record()) {
        Ok(event) => Ok(InFlight::new(device.clone(), host, event)),
        Err(error) => {
            let host = match stream.synchronize() {
                Ok(()) => host,
                Err(_) => host.leak(),
            };
            Err(Returned { host, error })
        }
    }
}
