//! Weights: how they are stored on a device (`Scheme`, `Weight`), and how they come from a file
//! (`HostWeight`).

use half::{bf16, f16};

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// How a weight's numbers are stored. A value, not a type: a model mixes them freely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain floating point.
    Dense(DType),
    /// 4-bit floats in blocks of 32 along k, with a shared power of two for each block.
    Mxfp4,
    /// 8-bit integers with a scale for each output.
    Int8Channel,
    /// 8-bit floats with a scale for each block.
    Fp8Block {
        /// Outputs of a block.
        n: u16,
        /// Inputs of a block.
        k: u16,
    },
    /// 8-bit floats with a scale for each output.
    Fp8Channel,
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::Dense(dtype) => write!(f, "{dtype}"),
            Scheme::Mxfp4 => f.write_str("mxfp4"),
            Scheme::Int8Channel => f.write_str("int8-channel"),
            Scheme::Fp8Block { n, k } => write!(f, "fp8-block-{n}x{k}"),
            Scheme::Fp8Channel => f.write_str("fp8-channel"),
        }
    }
}

/// The logical form of one weight: `matrices` of `[n, k]` each, y = x·Wᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostWeightMeta {
    /// 1 for a dense projection, else the number of experts.
    pub matrices: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// How the device is to store it.
    pub scheme: Scheme,
}

/// One stretch of outputs of a weight as a file has it. A fused weight (qkv) has several.
#[derive(Debug, Clone, Copy)]
pub struct HostPart<'a> {
    /// Outputs of this part.
    pub n: usize,
    /// The numbers.
    pub data: HostData<'a>,
}

/// Numbers of `[matrices, n, k]` in a file's layout.
#[derive(Debug, Clone, Copy)]
pub enum HostData<'a> {
    /// `[matrices, n, k]`, k innermost.
    RowMajor(DType, &'a [u8]),
    /// `[matrices, k, n]`, n innermost: how gpt_oss stores its experts.
    Transposed(DType, &'a [u8]),
    /// The hub's MXFP4: `blocks` `[matrices, n, k/32, 16]`, the low nibble first, and `scales`
    /// `[matrices, n, k/32]` with value = table\[nibble\] · 2^(scale − 127).
    Mxfp4 {
        /// Two elements in each byte.
        blocks: &'a [u8],
        /// One exponent for each block.
        scales: &'a [u8],
    },
    /// `[n, k]` of each matrix in a place of its own, k innermost: how most families store experts.
    Separate(&'a [(DType, &'a [u8])]),
}

/// One weight in host memory, on its way to [`crate::Backend::pack`].
#[derive(Debug)]
pub struct HostWeight<'a> {
    meta: HostWeightMeta,
    parts: Vec<HostPart<'a>>,
}

/// The sixteen values of a 4-bit float (OCP Microscaling Formats, E2M1).
const FP4: [f32; 16] = [0., 0.5, 1., 1.5, 2., 3., 4., 6., -0., -0.5, -1., -1.5, -2., -3., -4., -6.];

impl<'a> HostWeight<'a> {
    /// A weight whose outputs are those of `parts`, one after another.
    ///
    /// # Errors
    /// The parts' outputs do not add up to `meta.n`, or bytes are missing or left over.
    pub fn new(meta: HostWeightMeta, parts: Vec<HostPart<'a>>) -> Result<Self> {
        let bad = |what: String| Error::invalid("host weight", what);
        if parts.iter().map(|p| p.n).sum::<usize>() != meta.n || meta.n * meta.k == 0 {
            return Err(bad(format!("parts do not add up to {meta:?}")));
        }
        for part in &parts {
            let elements = meta.matrices * part.n * meta.k;
            let fits = match part.data {
                HostData::RowMajor(dtype, bytes) | HostData::Transposed(dtype, bytes) => {
                    dtype.is_float() && bytes.len() == elements * dtype.size()
                }
                HostData::Mxfp4 { blocks, scales } => {
                    meta.k.is_multiple_of(32)
                        && blocks.len() == elements / 2
                        && scales.len() == elements / 32
                }
                HostData::Separate(each) => {
                    let size = |dtype: DType| part.n * meta.k * dtype.size();
                    each.len() == meta.matrices
                        && each.iter().all(|&(d, bytes)| d.is_float() && bytes.len() == size(d))
                }
            };
            if !fits {
                return Err(bad(format!("a part of {} outputs does not fill {meta:?}", part.n)));
            }
        }
        Ok(HostWeight { meta, parts })
    }

    /// The logical form.
    pub fn meta(&self) -> &HostWeightMeta {
        &self.meta
    }

    /// The bytes of outputs `[first, first + rows)` of one matrix, little-endian and row-major, or of as many
    /// at their start as lie together, where they are in the type that the device is to store: what `decode`
    /// and rounding would give, without either.
    pub fn stored(&self, matrix: usize, first: usize, rows: usize) -> Option<&'a [u8]> {
        let HostWeightMeta { k, scheme, .. } = self.meta;
        let Scheme::Dense(wanted) = scheme else { return None };
        let mut begin = 0;
        let part = self.parts.iter().find(|part| {
            let found = first < begin + part.n;
            begin += if found { 0 } else { part.n };
            found
        })?;
        let first = first - begin;
        let (dtype, bytes, row) = match part.data {
            HostData::RowMajor(dtype, bytes) => (dtype, bytes, matrix * part.n + first),
            HostData::Separate(each) => {
                let &(dtype, bytes) = each.get(matrix)?;
                (dtype, bytes, first)
            }
            HostData::Transposed(..) | HostData::Mxfp4 { .. } => return None,
        };
        let rows = rows.min(part.n - first);
        let line = k * dtype.size();
        (dtype == wanted).then(|| bytes.get(row * line..(row + rows) * line)).flatten()
    }

    /// Decodes outputs `[first, first + rows)` of one matrix into `out`, `[rows, k]` f32.
    ///
    /// # Panics
    /// The range leaves the matrix, or `out` has another size: a bug of the backend.
    pub fn decode(&self, matrix: usize, first: usize, rows: usize, out: &mut [f32]) {
        let HostWeightMeta { matrices, n, k, .. } = self.meta;
        assert!(matrix < matrices && first + rows <= n && out.len() == rows * k);
        let mut begin = 0;
        for part in &self.parts {
            let lo = first.max(begin);
            let hi = (first + rows).min(begin + part.n);
            if lo < hi {
                let range = (lo - begin)..(hi - begin);
                part.decode(k, matrix, range, &mut out[(lo - first) * k..(hi - first) * k]);
            }
            begin += part.n;
        }
    }
}

impl HostPart<'_> {
    fn decode(&self, k: usize, matrix: usize, rows: std::ops::Range<usize>, out: &mut [f32]) {
        match self.data {
            HostData::RowMajor(dtype, bytes) => {
                let start = (matrix * self.n + rows.start) * k;
                decode_dense(dtype, bytes, start, out);
            }
            HostData::Transposed(dtype, bytes) => {
                // Input by input, so that each stretch of the file is read front to back.
                let count = rows.len();
                let mut line = vec![0.0; count];
                for input in 0..k {
                    let start = (matrix * k + input) * self.n + rows.start;
                    decode_dense(dtype, bytes, start, &mut line);
                    for (row, &value) in line.iter().enumerate() {
                        out[row * k + input] = value;
                    }
                }
            }
            HostData::Separate(each) => {
                let (dtype, bytes) = each[matrix];
                decode_dense(dtype, bytes, rows.start * k, out);
            }
            HostData::Mxfp4 { blocks, scales } => {
                let first = (matrix * self.n + rows.start) * k / 32;
                for (i, values) in out.chunks_exact_mut(32).enumerate() {
                    let block = first + i;
                    // 2^(scale − 127) exactly, also where it is subnormal; 255 stands for NaN.
                    let scale = match scales[block] {
                        255 => f32::NAN,
                        0 => f32::from_bits(1 << 22),
                        s => f32::from_bits(u32::from(s) << 23),
                    };
                    for (pair, &byte) in
                        values.chunks_exact_mut(2).zip(&blocks[block * 16..block * 16 + 16])
                    {
                        pair[0] = FP4[usize::from(byte & 15)] * scale;
                        pair[1] = FP4[usize::from(byte >> 4)] * scale;
                    }
                }
            }
        }
    }
}

/// Widens `out.len()` little-endian numbers from element `start` of `bytes`. Files give no alignment, so bytes are read one number at a time.
fn decode_dense(dtype: DType, bytes: &[u8], start: usize, out: &mut [f32]) {
    let size = dtype.size();
    let from = bytes[start * size..].chunks_exact(size);
    match dtype {
        DType::F32 => out.iter_mut().zip(from).for_each(|(o, b)| {
            *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }),
        DType::F16 => out.iter_mut().zip(from).for_each(|(o, b)| {
            *o = Float::to_f32(f16::from_le_bytes([b[0], b[1]]));
        }),
        DType::BF16 => out.iter_mut().zip(from).for_each(|(o, b)| {
            *o = Float::to_f32(bf16::from_le_bytes([b[0], b[1]]));
        }),
        DType::I32 | DType::U8 => unreachable!("HostWeight::new admits floating-point data only"),
    }
}

/// Widens a dense floating-point tensor of a file to f32.
///
/// # Errors
/// The type is no floating-point type, or `bytes` does not hold whole elements.
pub fn widen(dtype: DType, bytes: &[u8]) -> Result<Vec<f32>> {
    if !dtype.is_float() || !bytes.len().is_multiple_of(dtype.size()) {
        return Err(Error::invalid("widen", format!("{} bytes of {dtype}", bytes.len())));
    }
    let mut out = vec![0.0; bytes.len() / dtype.size()];
    decode_dense(dtype, bytes, 0, &mut out);
    Ok(out)
}

/// Rounds `values` to `dtype` (nearest, ties to even) into `out`.
///
/// # Panics
/// `dtype` is no floating-point type, or `out` has another size: a bug of the caller.
pub fn narrow(values: &[f32], dtype: DType, out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.size());
    let to = out.chunks_exact_mut(dtype.size());
    match dtype {
        DType::F32 => {
            values.iter().zip(to).for_each(|(v, b)| b.copy_from_slice(&v.to_le_bytes()));
        }
        DType::F16 => values
            .iter()
            .zip(to)
            .for_each(|(v, b)| b.copy_from_slice(&f16::from_f32(*v).to_le_bytes())),
        DType::BF16 => values
            .iter()
            .zip(to)
            .for_each(|(v, b)| b.copy_from_slice(&<bf16 as Float>::from_f32(*v).to_le_bytes())),
        DType::I32 | DType::U8 => panic!("narrow to {dtype}"),
    }
}

/// A weight on a device, in the backend's own layout.
#[derive(Debug, Clone)]
pub struct Weight<D: Device> {
    data: Tensor<D>,
    scales: Option<Tensor<D>>,
    meta: HostWeightMeta,
}

impl<D: Device> Weight<D> {
    /// Made by [`crate::Backend::pack`], or of rows: `data` and `scales` are what its operators expect.
    pub fn new(data: Tensor<D>, scales: Option<Tensor<D>>, meta: HostWeightMeta) -> Self {
        Weight { data, scales, meta }
    }

    /// Rows `[n, k]` as a weight, on a device that packs rows as they are ([`crate::Caps::packs_rows`]): their
    /// own memory, not a copy.
    ///
    /// # Errors
    /// `rows` is no dense matrix of floats.
    pub fn of_rows(rows: &Tensor<D>) -> Result<Self> {
        let (&[n, k], true) = (rows.dims(), rows.dtype().is_float() && rows.shape().is_dense())
        else {
            return Err(Error::invalid("weight", format!("{} {}", rows.dtype(), rows.shape())));
        };
        let scheme = Scheme::Dense(rows.dtype());
        let data = Tensor::new(rows.buffer().clone(), rows.offset(), &[n * k], rows.dtype())?;
        Ok(Weight::new(data, None, HostWeightMeta { matrices: 1, n, k, scheme }))
    }

    /// The packed numbers.
    pub fn data(&self) -> &Tensor<D> {
        &self.data
    }

    /// Their scales, where the scheme has them apart.
    pub fn scales(&self) -> Option<&Tensor<D>> {
        self.scales.as_ref()
    }

    /// Matrices: 1, or the number of experts.
    pub fn matrices(&self) -> usize {
        self.meta.matrices
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.meta.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.meta.k
    }

    /// How the numbers are stored.
    pub fn scheme(&self) -> Scheme {
        self.meta.scheme
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_orders_decode_to_the_same_rows() {
        let meta = HostWeightMeta { matrices: 2, n: 3, k: 2, scheme: Scheme::Dense(DType::F32) };
        let value = |m: usize, n: usize, k: usize| (m * 100 + n * 10 + k) as f32;
        let bytes = |order: fn(usize, usize) -> [usize; 2], outer: usize, inner: usize| {
            let mut out = Vec::new();
            for m in 0..2 {
                for o in 0..outer {
                    for i in 0..inner {
                        let [n, k] = order(o, i);
                        out.extend(value(m, n, k).to_le_bytes());
                    }
                }
            }
            out
        };
        let row_major = bytes(|o, i| [o, i], 3, 2);
        let transposed = bytes(|o, i| [i, o], 2, 3);
        let [first, rest] = [bytes(|o, i| [o, i], 1, 2), bytes(|o, i| [o + 1, i], 2, 2)];
        let halves = row_major.split_at(row_major.len() / 2);
        let each = [(DType::F32, halves.0), (DType::F32, halves.1)];
        let weights = [
            vec![HostPart { n: 3, data: HostData::RowMajor(DType::F32, &row_major) }],
            vec![HostPart { n: 3, data: HostData::Transposed(DType::F32, &transposed) }],
            vec![HostPart { n: 3, data: HostData::Separate(&each) }],
            vec![
                HostPart { n: 1, data: HostData::RowMajor(DType::F32, &first) },
                HostPart { n: 2, data: HostData::RowMajor(DType::F32, &rest) },
            ],
        ];
        let mut stored = 0;
        for parts in weights {
            let weight = HostWeight::new(meta, parts).expect("complete");
            let mut out = [0.0; 4];
            weight.decode(1, 0, 2, &mut out);
            assert_eq!(out, [100., 101., 110., 111.]);
            weight.decode(0, 1, 2, &mut out);
            assert_eq!(out, [10., 11., 20., 21.]);
            // Where the bytes can be had as they lie, they say the same.
            if let Some(bytes) = weight.stored(1, 0, 2) {
                let bytes = widen(DType::F32, bytes).expect("f32");
                assert!([100., 101., 110., 111.].starts_with(&bytes), "{bytes:?}");
                stored += bytes.len() / 2;
            }
        }
        assert_eq!(stored, 2 + 2 + 1, "rows in order, up to a part's end");
        let narrower = HostWeightMeta { scheme: Scheme::Dense(DType::BF16), ..meta };
        let part = HostPart { n: 3, data: HostData::RowMajor(DType::F32, &row_major) };
        let weight = HostWeight::new(narrower, vec![part]).expect("complete");
        assert_eq!(weight.stored(0, 0, 1), None, "another type");
    }

    #[test]
    fn mxfp4_decodes_every_nibble_and_scale() {
        let meta = HostWeightMeta { matrices: 1, n: 1, k: 64, scheme: Scheme::Dense(DType::F32) };
        let bytes: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let blocks = [bytes.clone(), bytes].concat();
        let data = HostData::Mxfp4 { blocks: &blocks, scales: &[128, 0] };
        let weight = HostWeight::new(meta, vec![HostPart { n: 1, data }]).expect("complete");
        let mut out = [0.0; 64];
        weight.decode(0, 0, 1, &mut out);
        assert_eq!(out[..4], [0.0, -12.0, 1.0, -8.0]);
        assert_eq!(out[14..18], [12.0, -0.0, -0.0, 12.0]);
        assert_eq!(f64::from(out[32 + 2]), 0.5 * 2f64.powi(-127));
    }

    #[test]
    fn missing_bytes_are_refused() {
        let meta = HostWeightMeta { matrices: 1, n: 2, k: 2, scheme: Scheme::Dense(DType::F32) };
        let part = |bytes| HostPart { n: 2, data: HostData::RowMajor(DType::F32, bytes) };
        assert!(HostWeight::new(meta, vec![part(&[0; 16])]).is_ok());
        assert!(HostWeight::new(meta, vec![part(&[0; 12])]).is_err());
        assert!(HostWeight::new(meta, vec![part(&[0; 16]), part(&[0; 16])]).is_err());
        let fits = |each: &[(DType, &[u8])]| {
            let part = HostPart { n: 2, data: HostData::Separate(each) };
            HostWeight::new(meta, vec![part]).is_ok()
        };
        assert!(fits(&[(DType::BF16, &[0; 8])]));
        assert!(!fits(&[(DType::F32, &[0; 8])]));
        assert!(!fits(&[(DType::BF16, &[0; 8]), (DType::BF16, &[0; 8])]));
    }
}
