//! The inner loops, once, over lanes: portable, AVX2 and AVX-512, chosen when the device opens.
//!
//! Every sum has one order that depends on nothing but its length: a product adds k in order into
//! one lane; a dot adds its lanes' partial sums in order. Row blocking and threads never change it.

use half::bf16;

use crate::memory::{Rows, RowsMut};

/// What the machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Level::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Level::Avx2;
            }
        }
        Level::Portable
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }
}

/// Some f32 lanes.
///
/// # Safety
/// Methods of an implementation may be called only where the CPU has its instructions.
unsafe trait Lanes: Copy {
    const LANES: usize;
    fn splat(value: f32) -> Self;
    /// # Safety
    /// `from` has [`Lanes::LANES`] readable elements.
    unsafe fn load_f32(from: *const f32) -> Self;
    /// # Safety
    /// `from` has [`Lanes::LANES`] readable elements.
    unsafe fn load_bf16(from: *const bf16) -> Self;
    /// # Safety
    /// `to` has [`Lanes::LANES`] writable elements.
    unsafe fn store(self, to: *mut f32);
    /// `self · b + c`, fused where the machine fuses.
    fn mul_add(self, b: Self, c: Self) -> Self;
}

// SAFETY: plain arithmetic runs everywhere.
unsafe impl<const N: usize> Lanes for [f32; N] {
    const LANES: usize = N;
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
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, bf16};
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    pub(super) struct Y8(__m256);
    #[derive(Clone, Copy)]
    pub(super) struct Y16(Y8, Y8);
    #[derive(Clone, Copy)]
    pub(super) struct Z16(__m512);

    // SAFETY: used under `avx2_fma` and `avx512` alone, whose callers have detected AVX2 and FMA (any
    // CPU with AVX-512F has both).
    unsafe impl Lanes for Y8 {
        const LANES: usize = 8;
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
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: 8 writable elements, by the caller; AVX, by the impl's contract.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: FMA, by the impl's contract.
            Y8(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }
    }

    // SAFETY: as for `Y8`, of which it is two.
    unsafe impl Lanes for Y16 {
        const LANES: usize = 16;
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
    }

    // SAFETY: used under `avx512` alone, whose callers have detected AVX-512F.
    unsafe impl Lanes for Z16 {
        const LANES: usize = 16;
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
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: 16 writable elements, by the caller; AVX-512F, by the impl's contract.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: AVX-512F, by the impl's contract.
            Z16(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }
    }
}

/// A type that inner loops can widen.
pub(crate) trait Widen: amphora_hal::Float {
    /// # Safety
    /// `from` has `V::LANES` readable elements.
    #[allow(private_bounds, private_interfaces)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V;
}

impl Widen for f32 {
    #[inline(always)]
    #[allow(private_bounds, private_interfaces)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller vouches for the elements.
        unsafe { V::load_f32(from) }
    }
}

impl Widen for bf16 {
    #[inline(always)]
    #[allow(private_bounds, private_interfaces)]
    unsafe fn lanes<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller vouches for the elements.
        unsafe { V::load_bf16(from) }
    }
}

/// Weights as panels: `[panels, k, lanes]`, each panel `lanes` outputs side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a, W> {
    pub(crate) data: &'a [W],
    pub(crate) k: usize,
    /// 8 or 16.
    pub(crate) lanes: usize,
}

/// `out[m, n] = Σ_k x[m, k] · w[n, k]`, k in order; `out` may cut the last panel short.
pub(crate) fn product<W: Widen>(
    level: Level,
    x: Rows<'_, f32>,
    w: Panels<'_, W>,
    out: RowsMut<'_, f32>,
) {
    assert!(x.width() == w.k && x.len() == out.len() && (w.lanes == 8 || w.lanes == 16));
    assert!(w.data.len() >= out.width().div_ceil(w.lanes) * w.k * w.lanes);
    match (level, w.lanes) {
        (Level::Portable, 8) => product_with::<[f32; 8], W>(x, w, out),
        (Level::Portable, _) => product_with::<[f32; 16], W>(x, w, out),
        // SAFETY: `Level::detect` gives these only where the CPU has the instructions.
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, 8) => unsafe { avx2_fma(|| product_with::<x86::Y8, W>(x, w, out)) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, _) => unsafe { avx2_fma(|| product_with::<x86::Y16, W>(x, w, out)) },
        // SAFETY: as above; AVX-512F implies AVX2 and FMA.
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, 8) => unsafe { avx512(|| product_with::<x86::Y8, W>(x, w, out)) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, _) => unsafe { avx512(|| product_with::<x86::Z16, W>(x, w, out)) },
    }
}

/// # Safety
/// The CPU has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2_fma<R>(body: impl FnOnce() -> R) -> R {
    body()
}

/// # Safety
/// The CPU has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn avx512<R>(body: impl FnOnce() -> R) -> R {
    body()
}

/// Runs `body` compiled for the widest vectors there are. Only what is inlined into it gains; nothing is
/// contracted, so its bits are the same at every level.
#[inline(always)]
pub(crate) fn widest<R>(level: Level, body: impl FnOnce() -> R) -> R {
    match level {
        Level::Portable => body(),
        // SAFETY: `Level::detect` gives these only where the CPU has the instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2_fma(body) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512(body) },
    }
}

/// Walks panels in groups and rows in blocks; a group stays in cache while the rows pass.
#[inline(always)]
fn product_with<V: Lanes, W: Widen>(x: Rows<'_, f32>, w: Panels<'_, W>, mut out: RowsMut<'_, f32>) {
    let (rows, panels) = (x.len(), out.width().div_ceil(V::LANES));
    let mut panel = 0;
    // With one or two rows eight panels hide the latency of a chain of adds; with more rows four do.
    let group = if rows <= 2 { 8 } else { 4 };
    while panel < panels {
        let wide = panels - panel >= group;
        let mut row = 0;
        while row < rows {
            row += match (wide, group, rows - row) {
                (true, 8, 1) => block::<V, W, 1, 8>(x, w, &mut out, row, panel),
                (true, 8, _) => block::<V, W, 2, 8>(x, w, &mut out, row, panel),
                (true, _, 6..) => block::<V, W, 6, 4>(x, w, &mut out, row, panel),
                (true, _, 3..) => block::<V, W, 3, 4>(x, w, &mut out, row, panel),
                (true, _, _) => block::<V, W, 1, 4>(x, w, &mut out, row, panel),
                (false, _, 4..) => block::<V, W, 4, 1>(x, w, &mut out, row, panel),
                (false, _, _) => block::<V, W, 1, 1>(x, w, &mut out, row, panel),
            };
        }
        panel += if wide { group } else { 1 };
    }
}

/// M rows by P panels in registers. Gives M.
#[inline(always)]
fn block<V: Lanes, W: Widen, const M: usize, const P: usize>(
    x: Rows<'_, f32>,
    w: Panels<'_, W>,
    out: &mut RowsMut<'_, f32>,
    row: usize,
    panel: usize,
) -> usize {
    let k = w.k;
    let xs: [*const f32; M] = std::array::from_fn(|m| x.row(row + m).as_ptr());
    let base = w.data[panel * k * V::LANES..].as_ptr();
    let mut acc = [[V::splat(0.0); P]; M];
    for i in 0..k {
        // SAFETY: panel + P panels of k · LANES elements lie in `w.data` (asserted in `product`,
        // and the walk takes P panels only where that many are left); each x row has k elements.
        unsafe {
            let weights: [V; P] =
                std::array::from_fn(|p| W::lanes::<V>(base.add((p * k + i) * V::LANES)));
            for m in 0..M {
                let value = V::splat(*xs[m].add(i));
                for p in 0..P {
                    acc[m][p] = value.mul_add(weights[p], acc[m][p]);
                }
            }
        }
    }
    for (m, sums) in acc.iter().enumerate() {
        let to = &mut out.row(row + m)[panel * V::LANES..];
        for (chunk, sum) in to.chunks_mut(V::LANES).zip(sums) {
            let mut lanes = [0.0; 16];
            // SAFETY: 16 is the most lanes there are.
            unsafe { sum.store(lanes.as_mut_ptr()) };
            chunk.copy_from_slice(&lanes[..chunk.len()]);
        }
    }
    M
}

/// `Σ a[i] · b[i]`.
pub(crate) fn dot<T: Widen>(level: Level, a: &[f32], b: &[T]) -> f32 {
    assert_eq!(a.len(), b.len());
    match level {
        Level::Portable => dot_with::<[f32; 16], T>(a, b),
        // SAFETY: `Level::detect` gives these only where the CPU has the instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2_fma(|| dot_with::<x86::Y16, T>(a, b)) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512(|| dot_with::<x86::Z16, T>(a, b)) },
    }
}

#[inline(always)]
fn dot_with<V: Lanes, T: Widen>(a: &[f32], b: &[T]) -> f32 {
    let whole = a.len() - a.len() % V::LANES;
    let mut acc = V::splat(0.0);
    for i in (0..whole).step_by(V::LANES) {
        // SAFETY: LANES elements are left in both, whose lengths are equal (asserted in `dot`).
        unsafe {
            acc = V::load_f32(a.as_ptr().add(i)).mul_add(T::lanes::<V>(b.as_ptr().add(i)), acc);
        }
    }
    let mut lanes = [0.0; 16];
    // SAFETY: 16 is the most lanes there are.
    unsafe { acc.store(lanes.as_mut_ptr()) };
    let head: f32 = lanes.iter().sum();
    a[whole..].iter().zip(&b[whole..]).fold(head, |sum, (a, b)| sum + a * b.to_f32())
}

/// `acc[i] += scale · v[i]`.
pub(crate) fn add_scaled<T: Widen>(level: Level, acc: &mut [f32], scale: f32, v: &[T]) {
    assert_eq!(acc.len(), v.len());
    match level {
        Level::Portable => add_scaled_with::<[f32; 16], T>(acc, scale, v),
        // SAFETY: `Level::detect` gives these only where the CPU has the instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2_fma(|| add_scaled_with::<x86::Y16, T>(acc, scale, v)) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512(|| add_scaled_with::<x86::Z16, T>(acc, scale, v)) },
    }
}

#[inline(always)]
fn add_scaled_with<V: Lanes, T: Widen>(acc: &mut [f32], scale: f32, v: &[T]) {
    let whole = acc.len() - acc.len() % V::LANES;
    let factor = V::splat(scale);
    for i in (0..whole).step_by(V::LANES) {
        // SAFETY: LANES elements are left in both, whose lengths are equal (asserted by the caller).
        unsafe {
            let to = acc.as_mut_ptr().add(i);
            factor.mul_add(T::lanes::<V>(v.as_ptr().add(i)), V::load_f32(to)).store(to);
        }
    }
    for (to, from) in acc[whole..].iter_mut().zip(&v[whole..]) {
        *to += scale * from.to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels() -> Vec<Level> {
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(Level::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                levels.push(Level::Avx512);
            }
        }
        levels
    }

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(747796405) | 1;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Every row count gives the bits that each row gives alone, and values near an f64 sum.
    #[test]
    fn a_product_does_not_depend_on_its_row_count() {
        for level in levels() {
            for (k, n, lanes) in [(1, 1, 16), (7, 16, 16), (33, 75, 16), (64, 200, 16), (40, 8, 8)]
            {
                let w = noise(usize::next_multiple_of(n, lanes) * k, 7);
                let panels = Panels { data: &w, k, lanes };
                for rows in [1, 2, 3, 4, 5, 6, 7, 9, 13, 20] {
                    let x = noise(rows * k, 3);
                    let mut out = vec![f32::NAN; rows * n];
                    product(level, Rows::of(&x, k), panels, RowsMut::of(&mut out, n));
                    for row in 0..rows {
                        let mut alone = vec![f32::NAN; n];
                        let one = Rows::of(&x[row * k..(row + 1) * k], k);
                        product(level, one, panels, RowsMut::of(&mut alone, n));
                        assert_eq!(alone, out[row * n..(row + 1) * n], "{level:?} {k} {n} {rows}");
                        for (col, got) in alone.iter().enumerate() {
                            let panel = &w[col / lanes * k * lanes..];
                            let want: f64 = (0..k)
                                .map(|i| {
                                    let w = panel[i * lanes + col % lanes];
                                    f64::from(x[row * k + i]) * f64::from(w)
                                })
                                .sum();
                            assert!((f64::from(*got) - want).abs() < 1e-5 * (k as f64).sqrt());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bf16_panels_equal_widened_ones() {
        for level in levels() {
            let w: Vec<bf16> = noise(48 * 20, 5).into_iter().map(bf16::from_f32).collect();
            let wide: Vec<f32> = w.iter().map(|v| v.to_f32()).collect();
            let x = noise(3 * 20, 9);
            let (mut a, mut b) = (vec![0.0; 3 * 41], vec![0.0; 3 * 41]);
            let panels = Panels { data: &w, k: 20, lanes: 16 };
            product(level, Rows::of(&x, 20), panels, RowsMut::of(&mut a, 41));
            let panels = Panels { data: &wide, k: 20, lanes: 16 };
            product(level, Rows::of(&x, 20), panels, RowsMut::of(&mut b, 41));
            assert_eq!(a, b);
            assert_eq!(dot(level, &x[..20], &w[..20]), dot(level, &x[..20], &wide[..20]));
        }
    }

    #[test]
    fn dots_and_sums_agree_with_plain_loops() {
        for level in levels() {
            for len in [0, 1, 15, 16, 17, 64, 80] {
                let (a, b) = (noise(len, 1), noise(len, 2));
                let plain: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum();
                assert!((f64::from(dot(level, &a, &b)) - plain).abs() < 1e-5);
                let mut acc = a.clone();
                add_scaled(level, &mut acc, 0.5, &b);
                for i in 0..len {
                    assert!((acc[i] - (a[i] + 0.5 * b[i])).abs() < 1e-6);
                }
            }
        }
    }
}
