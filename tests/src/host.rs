//! Tensors in host memory: what cases put on a device and what they get back.

use amphora_hal::DType;
use half::{bf16, f16};

/// Sixteen bits that are NaN as bf16 and f16, and doubled a NaN as f32. Unlike all-ones it is not
/// the −1 that operators write themselves, so a stray −1 is seen too.
pub const POISON: [u8; 2] = [0xE5, 0x7F];

/// A dense tensor as bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTensor {
    /// Extents, outermost first.
    pub dims: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// The elements in the host's byte order.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// Numbers rounded to a floating-point type.
    pub fn real(dims: &[usize], dtype: DType, values: &[f64]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), values.len(), "{dims:?}");
        let bytes = match dtype {
            DType::F32 => values.iter().flat_map(|v| (*v as f32).to_ne_bytes()).collect(),
            DType::F16 => {
                values.iter().flat_map(|v| f16::from_f32(odd(*v)).to_ne_bytes()).collect()
            }
            DType::BF16 => {
                values.iter().flat_map(|v| bf16::from_f32(odd(*v)).to_ne_bytes()).collect()
            }
            DType::I32 | DType::U8 => unreachable!("reals are stored in floating point"),
        };
        HostTensor { dims: dims.to_vec(), dtype, bytes }
    }

    /// 32-bit integers.
    pub fn ints(dims: &[usize], values: &[i32]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), values.len(), "{dims:?}");
        HostTensor {
            dims: dims.to_vec(),
            dtype: DType::I32,
            bytes: bytemuck::cast_slice(values).to_vec(),
        }
    }

    /// Filled with [`POISON`].
    pub fn poison(dims: &[usize], dtype: DType) -> Self {
        let len = dims.iter().product::<usize>() * dtype.size();
        HostTensor {
            dims: dims.to_vec(),
            dtype,
            bytes: POISON.iter().copied().cycle().take(len).collect(),
        }
    }

    /// Bytes as they came from a device.
    pub fn from_bytes(dims: &[usize], dtype: DType, bytes: &[u8]) -> Self {
        assert_eq!(dims.iter().product::<usize>() * dtype.size(), bytes.len());
        HostTensor { dims: dims.to_vec(), dtype, bytes: bytes.to_vec() }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Element `i` as a number.
    pub fn value(&self, i: usize) -> f64 {
        let at = |size: usize| &self.bytes[i * size..(i + 1) * size];
        match self.dtype {
            DType::F32 => f64::from(bytemuck::pod_read_unaligned::<f32>(at(4))),
            DType::F16 => f16::from_bits(bytemuck::pod_read_unaligned(at(2))).to_f64(),
            DType::BF16 => bf16::from_bits(bytemuck::pod_read_unaligned(at(2))).to_f64(),
            DType::I32 => f64::from(self.int(i)),
            DType::U8 => f64::from(self.bytes[i]),
        }
    }

    /// All elements as numbers.
    pub fn values(&self) -> Vec<f64> {
        (0..self.elements()).map(|i| self.value(i)).collect()
    }

    /// Element `i` of an integer tensor.
    pub fn int(&self, i: usize) -> i32 {
        assert_eq!(self.dtype, DType::I32);
        bytemuck::pod_read_unaligned(&self.bytes[i * 4..i * 4 + 4])
    }

    /// All elements of an integer tensor.
    pub fn to_ints(&self) -> Vec<i32> {
        (0..self.elements()).map(|i| self.int(i)).collect()
    }

    /// Some rows of the outermost dimension, in the given order.
    #[must_use]
    pub fn of_rows(&self, rows: &[usize]) -> Self {
        let mut dims = self.dims.clone();
        dims[0] = rows.len();
        HostTensor {
            dims,
            dtype: self.dtype,
            bytes: rows.iter().flat_map(|&row| self.row(row).to_vec()).collect(),
        }
    }

    /// The bytes of one row of the outermost dimension.
    pub fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.dims[0];
        &self.bytes[row * len..(row + 1) * len]
    }

    /// Bytes of one element.
    pub fn element(&self, i: usize) -> &[u8] {
        let size = self.dtype.size();
        &self.bytes[i * size..(i + 1) * size]
    }
}

/// `value` rounded to f32 by setting the last bit where anything was lost, so that a second rounding
/// to a type of half the width is the one correct rounding of `value` (Boldo and Melquiond 2008).
fn odd(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || !nearest.is_finite() {
        return nearest;
    }
    let away = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

/// `value` as `dtype` holds it.
pub fn round(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16::from_f32(odd(value)).to_f64(),
        DType::BF16 => bf16::from_f32(odd(value)).to_f64(),
        DType::I32 | DType::U8 => unreachable!("reals are stored in floating point"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_is_nan_in_every_floating_point_type() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert!(HostTensor::poison(&[3], dtype).values().iter().all(|v| v.is_nan()));
        }
        assert!(HostTensor::poison(&[1], DType::I32).int(0) > 1 << 30, "no index is this large");
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(round(DType::BF16, 1.0 + 2f64.powi(-8)), 1.0);
        assert_eq!(round(DType::BF16, 1.0 + 2f64.powi(-8) + 2f64.powi(-40)), 1.0 + 2f64.powi(-7));
        assert_eq!(round(DType::F16, 1.0 + 3.0 * 2f64.powi(-11)), 1.0 + 2f64.powi(-9));
    }
}
