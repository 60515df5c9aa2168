//! f32 lanes: what a level's vectors can do, and the types that are widened into them.

use half::bf16;

use super::Level;
use super::product::{self, Panels, Values};
use crate::memory::{Rows, RowsMut};

/// Some f32 lanes.
///
/// # Safety
/// Methods of an implementation may be called only where the CPU has its instructions.
pub(super) unsafe trait Lanes: Copy {
    const LANES: usize;
    /// Half as many lanes.
    type Half: Lanes;
    /// How many of these registers hold. What block shapes follow from.
    const REGISTERS: usize;
    fn splat(value: f32) -> Self;
    /// # Safety
    /// `from` has [`Lanes::LANES`] readable elements.
    unsafe fn load_f32(from: *const f32) -> Self;
    /// # Safety
    /// `from` has [`Lanes::LANES`] readable elements.
    unsafe fn load_bf16(from: *const bf16) -> Self;
    /// The even and the odd elements.
    ///
    /// # Safety
    /// `from` has twice [`Lanes::LANES`] readable elements.
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self);
    /// # Safety
    /// `to` has [`Lanes::LANES`] writable elements.
    unsafe fn store(self, to: *mut f32);
    /// `self · b + c`, fused where the machine fuses.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// The sum of the lanes: halves are added until one is left.
    fn sum(self) -> f32;
    /// [`Lanes::sum`] of each of 16, with the same bits.
    #[inline(always)]
    fn sums(of: [Self; 16]) -> [f32; 16] {
        of.map(|lanes| lanes.sum())
    }
}

/// Halves are added until one is left.
#[inline(always)]
fn tree<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

// SAFETY: plain arithmetic runs everywhere.
unsafe impl<const N: usize> Lanes for [f32; N] {
    const LANES: usize = N;
    /// 16 lanes are the only ones that are halved.
    type Half = [f32; 8];
    const REGISTERS: usize = 8;
    #[inline(always)]
    fn splat(value: f32) -> Self {
        [value; N]
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for N elements.
        unsafe { from.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for N elements.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
        // SAFETY: the caller vouches for 2 · N elements.
        let bits = unsafe { from.cast::<[[u16; 2]; N]>().read_unaligned() };
        let one = |at: usize| bits.map(|pair| f32::from_bits(u32::from(pair[at]) << 16));
        (one(0), one(1))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for N elements.
        unsafe { to.cast::<[f32; N]>().write_unaligned(self) }
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        let mut out = c;
        for i in 0..N {
            out[i] += self[i] * b[i];
        }
        out
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        tree(self)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::{Lanes, bf16, tree};
    use std::arch::x86_64::*;

    /// # Safety
    /// The CPU has AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(in crate::simd) unsafe fn avx2_fma<R>(body: impl FnOnce() -> R) -> R {
        body()
    }

    /// # Safety
    /// The CPU has AVX-512 F, DQ and VL, AVX2 and FMA.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma")]
    pub(in crate::simd) unsafe fn avx512<R>(body: impl FnOnce() -> R) -> R {
        body()
    }

    #[derive(Clone, Copy)]
    pub(in crate::simd) struct Y8(__m256);
    #[derive(Clone, Copy)]
    pub(in crate::simd) struct Y16(Y8, Y8);
    #[derive(Clone, Copy)]
    pub(in crate::simd) struct Z16(__m512);

    // SAFETY: used under `levels` alone, whose callers have detected AVX2 and FMA (they
    // detect both for AVX-512 too).
    unsafe impl Lanes for Y8 {
        const LANES: usize = 8;
        type Half = Y8;
        const REGISTERS: usize = 16;
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: AVX, by the impl's contract.
            Y8(unsafe { _mm256_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load_f32(from: *const f32) -> Self {
            // SAFETY: 8 readable elements, by the caller; AVX, by the impl's contract.
            Y8(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: 8 readable elements, by the caller; AVX2, by the impl's contract.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                Y8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
            }
        }
        #[inline(always)]
        unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
            // SAFETY: 16 readable elements, by the caller; AVX2, by the impl's contract.
            unsafe {
                let both = _mm256_loadu_si256(from.cast());
                let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                let even = _mm256_slli_epi32::<16>(both);
                (Y8(_mm256_castsi256_ps(even)), Y8(_mm256_castsi256_ps(odd)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: 8 writable elements, by the caller; AVX, by the impl's contract.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: FMA, by the impl's contract.
            Y8(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            let mut lanes = [0.0; 8];
            // SAFETY: there are 8.
            unsafe { self.store(lanes.as_mut_ptr()) };
            tree(lanes)
        }
    }

    // SAFETY: as for `Y8`, of which it is two.
    unsafe impl Lanes for Y16 {
        const LANES: usize = 16;
        type Half = Y8;
        const REGISTERS: usize = 8;
        #[inline(always)]
        fn splat(value: f32) -> Self {
            Y16(Y8::splat(value), Y8::splat(value))
        }
        #[inline(always)]
        unsafe fn load_f32(from: *const f32) -> Self {
            // SAFETY: 16 readable elements, by the caller.
            unsafe { Y16(Y8::load_f32(from), Y8::load_f32(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: 16 readable elements, by the caller.
            unsafe { Y16(Y8::load_bf16(from), Y8::load_bf16(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
            // SAFETY: 32 readable elements, by the caller.
            let ((a, b), (c, d)) = unsafe { (Y8::load_pairs(from), Y8::load_pairs(from.add(16))) };
            (Y16(a, c), Y16(b, d))
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: 16 writable elements, by the caller.
            unsafe {
                self.0.store(to);
                self.1.store(to.add(8));
            }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            Y16(self.0.mul_add(b.0, c.0), self.1.mul_add(b.1, c.1))
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: AVX, by the impl's contract.
            Y8(unsafe { _mm256_add_ps(self.0.0, self.1.0) }).sum()
        }
    }

    // SAFETY: used under `levels` alone, whose callers have detected AVX-512F and DQ.
    unsafe impl Lanes for Z16 {
        const LANES: usize = 16;
        type Half = Y8;
        const REGISTERS: usize = 32;
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: AVX-512F, by the impl's contract.
            Z16(unsafe { _mm512_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load_f32(from: *const f32) -> Self {
            // SAFETY: 16 readable elements, by the caller; AVX-512F, by the impl's contract.
            Z16(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: 16 readable elements, by the caller; AVX-512F, by the impl's contract.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                Z16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
            }
        }
        #[inline(always)]
        unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
            // SAFETY: 32 readable elements, by the caller; AVX-512F, by the impl's contract.
            unsafe {
                let both = _mm512_loadu_si512(from.cast());
                let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                let even = _mm512_slli_epi32::<16>(both);
                (Z16(_mm512_castsi512_ps(even)), Z16(_mm512_castsi512_ps(odd)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: 16 writable elements, by the caller; AVX-512F, by the impl's contract.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: AVX-512F, by the impl's contract.
            Z16(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: AVX-512F and DQ, by the impl's contract.
            Y8(unsafe {
                let upper = _mm512_extractf32x8_ps::<1>(self.0);
                _mm256_add_ps(_mm512_castps512_ps256(self.0), upper)
            })
            .sum()
        }
        #[inline(always)]
        fn sums(of: [Self; 16]) -> [f32; 16] {
            /// Adds halves of `$a` and `$b`, the even ones of two shuffles to the odd ones.
            macro_rules! merge {
                ($shuffle:ident, $even:literal, $odd:literal, $a:expr, $b:expr) => {
                    _mm512_add_ps($shuffle::<$even>($a, $b), $shuffle::<$odd>($a, $b))
                };
            }
            // SAFETY: AVX-512F, by the impl's contract.
            unsafe {
                // Lane i to lane i + 8, then i + 4, i + 2, i + 1, as `tree` does.
                let v = |i: usize| of[i].0;
                let eights: [__m512; 8] = std::array::from_fn(|i| {
                    merge!(
                        _mm512_shuffle_f32x4,
                        0b01_00_01_00,
                        0b11_10_11_10,
                        v(2 * i),
                        v(2 * i + 1)
                    )
                });
                let fours: [__m512; 4] = std::array::from_fn(|i| {
                    let (a, b) = (eights[2 * i], eights[2 * i + 1]);
                    merge!(_mm512_shuffle_f32x4, 0b10_00_10_00, 0b11_01_11_01, a, b)
                });
                // Each 128 bits belong to one of four sums: 2·(pair) + (half), pairs in order.
                let twos: [__m512; 2] = std::array::from_fn(|i| {
                    let (a, b) = (fours[2 * i], fours[2 * i + 1]);
                    merge!(_mm512_shuffle_ps, 0b01_00_01_00, 0b11_10_11_10, a, b)
                });
                let ones =
                    merge!(_mm512_shuffle_ps, 0b10_00_10_00, 0b11_01_11_01, twos[0], twos[1]);
                // Lane 4·b + q now holds the sum of vector 4·q + b.
                let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                let mut out = [0.0; 16];
                _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(order, ones));
                out
            }
        }
    }
}

/// A type that inner loops can widen.
pub(crate) trait Widen: amphora_hal::Float {
    /// # Safety
    /// `from` has `V::LANES` readable elements.
    #[allow(private_bounds, private_interfaces)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V;
    /// Rounds to nearest, ties to even; a NaN stays one. Written without branches, so that loops over it become vectors.
    fn round(value: f32) -> Self;
    /// Exact.
    fn wide(self) -> f32;
    /// How many of k a panel has side by side.
    const TOGETHER: usize;
    /// Rows of values as a product takes them.
    fn values(rows: Rows<'_, Self>) -> Values<'_>;
    /// The product of panels of this type.
    fn product(level: Level, x: Values<'_>, w: Panels<'_, Self>, out: RowsMut<'_, f32>);
}

impl Widen for f32 {
    #[inline(always)]
    #[allow(private_bounds, private_interfaces)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller vouches for the elements.
        unsafe { V::load_f32(from) }
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    const TOGETHER: usize = 1;
    fn values(rows: Rows<'_, Self>) -> Values<'_> {
        Values::F32(rows)
    }
    fn product(level: Level, x: Values<'_>, w: Panels<'_, Self>, out: RowsMut<'_, f32>) {
        product::product_f32(level, x, w, out);
    }
}

impl Widen for bf16 {
    #[inline(always)]
    #[allow(private_bounds, private_interfaces)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller vouches for the elements.
        unsafe { V::load_bf16(from) }
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    const TOGETHER: usize = 2;
    fn values(rows: Rows<'_, Self>) -> Values<'_> {
        Values::Bf16(rows)
    }
    fn product(level: Level, x: Values<'_>, w: Panels<'_, Self>, out: RowsMut<'_, f32>) {
        product::product_bf16(level, x, w, out);
    }
}
