//! Weights as stretches of one random pattern, copied as they are: for random numbers any packed layout
//! of row-major 16-bit numbers is as good, and packing so much on the host would take minutes.

use amphora_hal::ops::split_mix64;
use amphora_hal::{Backend, DType, HostBytes, Result, Returned, Span, Tensor, narrow};

/// Bytes of the pattern, and of the stretches that weights are made of.
pub(crate) const PATTERN: usize = 64 << 20;
const STRETCH: usize = 16 << 20;

/// bf16 numbers, uniform with a deviation that keeps the values of a layer near 1.
#[derive(Debug)]
pub struct Pattern {
    bytes: Vec<u8>,
}

impl Pattern {
    /// The same numbers each time.
    #[allow(clippy::new_without_default)] // It takes 64 MiB and a moment.
    pub fn new() -> Self {
        let mut bytes = vec![0; PATTERN];
        let value = |i: usize| {
            let four = split_mix64(0, (i / 4) as u64 + 1);
            let part = (four >> (16 * (i % 4))) as u16;
            (f32::from(part) / 32768.0 - 1.0) * 0.035
        };
        let values: Vec<f32> = (0..PATTERN / 2).map(value).collect();
        narrow(&values, DType::BF16, &mut bytes);
        Pattern { bytes }
    }

    /// Where stretch `index` of the tensor `seed` begins.
    fn offset(seed: u64, index: usize) -> usize {
        let mixed = (seed * 0x1_0001 + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        mixed as usize % ((PATTERN - STRETCH) / 256) * 256
    }

    /// Element `at` of the tensor `seed`.
    pub fn value(&self, seed: u64, at: usize) -> f64 {
        let byte = Self::offset(seed, 2 * at / STRETCH) + 2 * at % STRETCH;
        let bits = u16::from_le_bytes([self.bytes[byte], self.bytes[byte + 1]]);
        f64::from(f32::from_bits(u32::from(bits) << 16))
    }

    /// The pattern in host bytes that [`fill`] copies from.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn host<B: Backend>(&self, device: &B) -> Result<Option<B::Host>> {
        let mut host = device.reserve_host(PATTERN)?;
        host.bytes_mut()[..PATTERN].copy_from_slice(&self.bytes);
        Ok(Some(host))
    }
}

/// Makes `tensor` the tensor `seed` of the pattern, which lies in `pattern` before and after.
pub(crate) fn fill<B: Backend>(
    device: &B,
    stream: &mut B::Stream,
    pattern: &mut Option<B::Host>,
    (tensor, seed): (&Tensor<B>, u64),
) -> Result<()> {
    let bytes = tensor.bytes();
    let spans: Vec<Span> = (0..bytes.div_ceil(STRETCH))
        .map(|i| Span {
            from: Pattern::offset(seed, i),
            to: i * STRETCH,
            len: STRETCH.min(bytes - i * STRETCH),
        })
        .collect();
    let Some(host) = pattern.take() else {
        return Err(amphora_hal::Error::invalid(
            "measure",
            "an upload of the pattern failed before",
        ));
    };
    let mut whole = Tensor::new(tensor.buffer().clone(), tensor.offset(), &[bytes], DType::U8)?;
    let sent = device.upload(stream, host, &spans, &mut whole).map_err(|r: Returned<_>| r.error)?;
    *pattern = Some(sent.finish()?);
    Ok(())
}
