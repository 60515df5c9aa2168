//! Element types of tensors, and the host types that mirror them.

use half::{bf16, f16};

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// 32-bit signed integers: plans, routing, token ids.
    I32,
    /// Raw bytes: the adapter arena, packed weights.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// Whether this is one of the floating-point types that activations may have.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::U8 => "u8",
        })
    }
}

/// A host type with the layout of a [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The matching tensor type.
    const DTYPE: DType;
}

/// A floating-point [`Element`]; arithmetic is done in f32 and rounded once on the way back.
pub trait Float: Element {
    /// Exact widening.
    fn to_f32(self) -> f32;
    /// Rounding to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}
impl Float for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}
impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // Branch-free, so that loops over rows vectorise: half a unit of the last place kept is added,
        // less one where that place is even; a NaN keeps its upper bits and stays a NaN.
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits >> 16 | 0x40;
        bf16::from_bits(if value.is_nan() { nan } else { rounded } as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_like_the_reference() {
        let edges = [0x3f80_7fff, 0x3f80_8000, 0x3f81_8000, 0x7f7f_ffff, 0x7f80_0000, 0x7f80_0001];
        let spread = (0..1u32 << 16).map(|i| i.wrapping_mul(0x9e37_79b9));
        for bits in edges.into_iter().chain(spread) {
            let value = f32::from_bits(bits);
            let (got, want) = (<bf16 as Float>::from_f32(value), bf16::from_f32(value));
            assert!(got == want || got.is_nan() && want.is_nan(), "{bits:08x}: {got} for {want}");
            assert_eq!(got.is_sign_negative(), want.is_sign_negative());
        }
    }
}
