//! Weights and adapter factors into this backend's layout: plain row-major numbers.

use amphora_hal::{
    Backend, DType, Error, Factor, HostFactor, HostWeight, HostWeightMeta, LoraShape, OpKey,
    OpKind, RankClass, Result, Scheme, Tensor, Weight, narrow,
};

use rayon::prelude::*;

use crate::device::{Cuda, CudaStream};

pub(crate) const DENSE_ONLY: &str = "weights are stored as f32, f16 or bf16";

/// Bytes brought to the device at a time.
const CHUNK: usize = 64 << 20;

/// Rows that a thread converts at a time: enough that a transposed file is read in long stretches.
const ROWS_AT_ONCE: usize = 64;

/// The type of a dense weight's numbers.
pub(crate) fn stored(scheme: Scheme) -> Result<DType> {
    match scheme {
        Scheme::Dense(dtype) if dtype.is_float() => Ok(dtype),
        _ => Err(Error::Unsupported {
            key: OpKey::new(OpKind::Linear, DType::F32).scheme(scheme),
            reason: DENSE_ONLY,
        }),
    }
}

impl Backend for Cuda {
    fn packed_bytes(&self, meta: &HostWeightMeta) -> Result<usize> {
        packed_bytes(meta)
    }

    fn pack(
        &self,
        stream: &mut CudaStream,
        weight: &HostWeight<'_>,
        into: Tensor<Self>,
    ) -> Result<Weight<Self>> {
        let meta = *weight.meta();
        let dtype = stored(meta.scheme)?;
        let bytes = packed_bytes(&meta)?;
        if into.dtype() != DType::U8 || into.bytes() != bytes || !into.shape().is_dense() {
            return Err(Error::invalid("pack", format!("{bytes} bytes into {}", into.shape())));
        }
        let line = meta.k * dtype.size();
        let rows = (CHUNK / line).clamp(1, meta.n);
        let mut packed = Vec::new();
        for matrix in 0..meta.matrices {
            let mut first = 0;
            while first < meta.n {
                let count = rows.min(meta.n - first);
                let at = (matrix * meta.n + first) * line;
                if let Some(bytes) = weight.stored(matrix, first, count) {
                    self.upload_now(stream, bytes, &into, at)?;
                    first += bytes.len() / line;
                    continue;
                }
                packed.resize(count * line, 0u8);
                let pieces = packed.par_chunks_mut(ROWS_AT_ONCE * line);
                pieces.enumerate().for_each_init(Vec::new, |values, (index, piece)| {
                    let count = piece.len() / line;
                    values.resize(count * meta.k, 0f32);
                    weight.decode(matrix, first + index * ROWS_AT_ONCE, count, values);
                    narrow(values, dtype, piece);
                });
                self.upload_now(stream, &packed, &into, at)?;
                first += count;
            }
        }
        let elements = bytes / dtype.size();
        let data = Tensor::new(into.buffer().clone(), into.offset(), &[elements], dtype)?;
        Ok(Weight::new(data, None, meta))
    }
}

fn packed_bytes(meta: &HostWeightMeta) -> Result<usize> {
    let size = stored(meta.scheme)?.size();
    let elements = meta.matrices.checked_mul(meta.n).and_then(|rows| rows.checked_mul(meta.k));
    elements
        .and_then(|elements| elements.checked_mul(size))
        .ok_or_else(|| Error::invalid("pack", format!("{meta:?} overflows")))
}

/// Bytes of a block: `[class, width]` for A, `[width, class]` for B.
pub(crate) fn lora_block(
    classes: &[RankClass],
    shape: LoraShape,
    class: RankClass,
) -> Result<usize> {
    if !shape.dtype.is_float() || !classes.contains(&class) {
        return Err(Error::Unsupported {
            key: OpKey::new(OpKind::LoraLinear, shape.dtype).class(class),
            reason: "no such rank class or type",
        });
    }
    class
        .get()
        .checked_mul(shape.width)
        .and_then(|elements| elements.checked_mul(shape.dtype.size()))
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| Error::invalid("lora block", format!("{shape:?} has no bytes or too many")))
}

/// Fills one block.
pub(crate) fn pack_lora(
    classes: &[RankClass],
    factor: &HostFactor<'_>,
    into: &mut [u8],
) -> Result<()> {
    let HostFactor { shape, class, rank, data } = *factor;
    let bytes = lora_block(classes, shape, class)?;
    if into.len() != bytes || rank > class.get() || data.len() != rank * shape.width {
        return Err(Error::invalid(
            "pack_lora",
            format!("{shape:?} of rank {rank}: {} values into {} bytes", data.len(), into.len()),
        ));
    }
    let (stored, wanted) = match shape.factor {
        Factor::A => (shape.width, shape.width),
        Factor::B => (rank, class.get()),
    };
    let mut line = vec![0f32; wanted];
    for (i, to) in into.chunks_exact_mut(wanted * shape.dtype.size()).enumerate() {
        // The data has no lines of A beyond the rank.
        let from = data.get(i * stored..(i + 1) * stored).unwrap_or(&[]);
        line[..from.len()].copy_from_slice(from);
        line[from.len()..].fill(0.0);
        let fits = line.iter().all(|value| value.abs() <= SMALL);
        let misfit = (!fits).then(|| line.iter().find(|value| overflows(**value, shape.dtype)));
        if let Some(value) = misfit.flatten() {
            let what = format!("{value} does not fit {} ({shape:?})", shape.dtype);
            return Err(Error::invalid("pack_lora", what));
        }
        narrow(&line, shape.dtype, to);
    }
    Ok(())
}

/// Up to here numbers stay finite in every type: f16's largest.
const SMALL: f32 = 65504.0;

/// Whether rounding to `dtype` gives no number. An infinity of the file is one of these: against a
/// zero of another row it would spread.
fn overflows(value: f32, dtype: DType) -> bool {
    let rounded = match dtype {
        DType::F16 => half::f16::from_f32(value).to_f32(),
        DType::BF16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    };
    !rounded.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: [RankClass; 2] = [RankClass::new(8), RankClass::new(16)];

    fn block(factor: Factor, rank: usize, data: &[f32], dtype: DType) -> Result<Vec<f32>> {
        let shape = LoraShape { factor, width: 3, dtype };
        let mut bytes = vec![0xff; lora_block(&CLASSES, shape, CLASSES[0])?];
        let factor = HostFactor { shape, class: CLASSES[0], rank, data };
        pack_lora(&CLASSES, &factor, &mut bytes)?;
        amphora_hal::widen(dtype, &bytes)
    }

    #[test]
    fn blocks_are_row_major_and_padded_with_zeros() {
        let data = [1., 2., 3., 4., 5., 6.];
        let a = block(Factor::A, 2, &data, DType::F32).expect("sound");
        assert_eq!(a[..6], data);
        assert!(a.len() == 24 && a[6..].iter().all(|&v| v == 0.0));
        let b = block(Factor::B, 2, &data, DType::BF16).expect("sound");
        assert_eq!(
            (b.len(), &b[..3], &b[8..10], b[17]),
            (24, &[1., 2., 0.][..], &[3., 4.][..], 6.0)
        );
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let big = [1e5, 0., 0.];
        assert!(block(Factor::A, 1, &big, DType::BF16).is_ok());
        let error = block(Factor::A, 1, &big, DType::F16).expect_err("f16 ends at 65504");
        assert!(error.to_string().contains("100000"), "{error}");
        assert!(block(Factor::A, 1, &[f32::NAN, 0., 0.], DType::F32).is_err());
        assert!(block(Factor::A, 9, &[0.; 27], DType::F32).is_err(), "rank above the class");
        assert!(block(Factor::A, 2, &big, DType::F32).is_err(), "values missing");
        let shape = LoraShape { factor: Factor::A, width: 3, dtype: DType::F32 };
        assert!(lora_block(&CLASSES, shape, RankClass::new(9)).is_err());
    }

    #[test]
    fn only_dense_weights_are_stored() {
        let meta = |scheme| HostWeightMeta { matrices: 2, n: 3, k: 5, scheme };
        assert_eq!(packed_bytes(&meta(Scheme::Dense(DType::BF16))), Ok(60));
        assert!(packed_bytes(&meta(Scheme::Mxfp4)).is_err());
        assert!(packed_bytes(&meta(Scheme::Dense(DType::I32))).is_err());
    }
}
