//! The product: weights in panels of 16 outputs (8 for the smallest rank class), values broadcast.
//!
//! A panel `[k, lanes]` of f32 has one k after another. One of bf16 has two of k side by side for each
//! lane, `[⌈k/2⌉, lanes, 2]`: one load gives both, widened by a shift and a mask, or taken by a dot product
//! of pairs as they are. Rows are packed into a buffer by blocks, so that the loop reads one stretch of
//! values and one of each panel. A block of k keeps its sums in `out`, in f32, which changes no bit.

use half::bf16;

use super::Level;
use super::lanes::{Lanes, Widen};
use super::levels;
use crate::memory::{Rows, RowsMut};

/// Weights as panels: each panel `lanes` outputs side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a, W> {
    pub(crate) data: &'a [W],
    pub(crate) k: usize,
    /// 8 or 16.
    pub(crate) lanes: usize,
}

/// Elements of a panel.
pub(crate) fn panel_elements<W: Widen>(k: usize, lanes: usize) -> usize {
    k.next_multiple_of(W::TOGETHER) * lanes
}

/// Fills a panel: `value(lane, i)` is the lane's i-th weight.
pub(crate) fn pack_panel<W: Widen>(
    (k, lanes): (usize, usize),
    value: impl Fn(usize, usize) -> f32,
    mut put: impl FnMut(usize, W),
) {
    for i in 0..k.next_multiple_of(W::TOGETHER) {
        for lane in 0..lanes {
            let at = (i / W::TOGETHER * lanes + lane) * W::TOGETHER + i % W::TOGETHER;
            put(at, W::from_f32(if i < k { value(lane, i) } else { 0.0 }));
        }
    }
}

/// The values of a product, at their own type.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Values<'a> {
    F32(Rows<'a, f32>),
    Bf16(Rows<'a, bf16>),
}

impl Values<'_> {
    fn dims(&self) -> (usize, usize) {
        match self {
            Values::F32(rows) => (rows.len(), rows.width()),
            Values::Bf16(rows) => (rows.len(), rows.width()),
        }
    }
}

/// `out[m, n] = Σ_k x[m, k] · w[n, k]`, k in order; `out` may cut the last panel short.
pub(crate) fn product<X: Widen, W: Widen>(
    level: Level,
    x: Rows<'_, X>,
    w: Panels<'_, W>,
    out: RowsMut<'_, f32>,
) {
    let x = X::values(x);
    assert!(x.dims() == (out.len(), w.k) && (w.lanes == 8 || w.lanes == 16));
    let panels = out.width().div_ceil(w.lanes);
    assert!(w.data.len() >= panels * panel_elements::<W>(w.k, w.lanes));
    W::product(level, x, w, out);
}

/// The product of f32 panels.
pub(super) fn product_f32(level: Level, x: Values<'_>, w: Panels<'_, f32>, out: RowsMut<'_, f32>) {
    match w.lanes {
        16 => singles16(level, x, w, out),
        _ => singles8(level, x, w, out),
    }
}

/// The product of bf16 panels.
pub(super) fn product_bf16(
    level: Level,
    x: Values<'_>,
    w: Panels<'_, bf16>,
    out: RowsMut<'_, f32>,
) {
    match w.lanes {
        16 => pairs16(level, x, w, out),
        _ => pairs8(level, x, w, out),
    }
}

levels! {
    fn singles16<V>(x: Values<'_>, w: Panels<'_, f32>, out: RowsMut<'_, f32>) {
        walk::<Singles<V>>(x, w, out)
    }
}

levels! {
    fn singles8<V>(x: Values<'_>, w: Panels<'_, f32>, out: RowsMut<'_, f32>) {
        walk::<Singles<V::Half>>(x, w, out)
    }
}

levels! {
    fn pairs16<V>(x: Values<'_>, w: Panels<'_, bf16>, out: RowsMut<'_, f32>) {
        walk::<Pairs<V>>(x, w, out)
    }
}

levels! {
    fn pairs8<V>(x: Values<'_>, w: Panels<'_, bf16>, out: RowsMut<'_, f32>) {
        walk::<Pairs<V::Half>>(x, w, out)
    }
}

/// One way of taking weights into sums, [`Step::K`] of k at a time.
///
/// # Safety
/// As [`Lanes`]: its methods may be called only where the CPU has their instructions.
unsafe trait Step {
    type V: Lanes;
    type W: Widen;
    /// K weights of every lane.
    type Loaded: Copy;
    const K: usize = Self::W::TOGETHER;
    /// # Safety
    /// `from` has K · LANES readable elements.
    unsafe fn load(from: *const Self::W) -> Self::Loaded;
    /// The sum with K values more, each `apart` from the one before.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn add(sum: Self::V, x: *const f32, apart: usize, w: Self::Loaded) -> Self::V;
}

/// f32 weights.
struct Singles<V>(std::marker::PhantomData<V>);

// SAFETY: as `Lanes`, which it is made of.
unsafe impl<V: Lanes> Step for Singles<V> {
    type V = V;
    type W = f32;
    type Loaded = V;
    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        // SAFETY: the caller vouches for the elements.
        unsafe { V::load_f32(from) }
    }
    #[inline(always)]
    unsafe fn add(sum: V, x: *const f32, _: usize, w: V) -> V {
        // SAFETY: the caller vouches for the value.
        V::splat(unsafe { x.read() }).mul_add(w, sum)
    }
}

/// bf16 weights, widened.
struct Pairs<V>(std::marker::PhantomData<V>);

// SAFETY: as `Lanes`, which it is made of.
unsafe impl<V: Lanes> Step for Pairs<V> {
    type V = V;
    type W = bf16;
    type Loaded = (V, V);
    #[inline(always)]
    unsafe fn load(from: *const bf16) -> (V, V) {
        // SAFETY: the caller vouches for the elements.
        unsafe { V::load_pairs(from) }
    }
    #[inline(always)]
    unsafe fn add(sum: V, x: *const f32, apart: usize, w: (V, V)) -> V {
        // SAFETY: the caller vouches for both values.
        let (even, odd) = unsafe { (x.read(), x.add(apart).read()) };
        V::splat(odd).mul_add(w.1, V::splat(even).mul_add(w.0, sum))
    }
}

/// Words of the buffer of packed values: a third of the smallest first cache.
const BUFFER: usize = 4096;
/// Bytes of panels that rows pass over again and again: half of a usual second cache.
const PANELS: usize = 1 << 20;

/// What `walk` hands to its blocks.
struct Pass<'a, 'o, W> {
    x: Values<'a>,
    w: Panels<'a, W>,
    out: RowsMut<'o, f32>,
    /// Panels of this turn.
    panels: std::ops::Range<usize>,
    /// Steps of k of this turn.
    steps: std::ops::Range<usize>,
    /// Values `[k, rows]` of this turn.
    buffer: [f32; BUFFER],
}

/// Walks blocks of panels, of k, and of rows; the panels of a block stay in cache while the rows pass.
#[inline(always)]
fn walk<S: Step>(x: Values<'_>, w: Panels<'_, S::W>, out: RowsMut<'_, f32>) {
    let rows = out.len();
    let panels = out.width().div_ceil(S::V::LANES);
    let steps = w.k.div_ceil(S::K);
    let most = rows.min(if S::V::REGISTERS == 32 { 12 } else { 6 }).max(1);
    let together = (BUFFER / S::K / most).min(steps).max(1);
    let group = match rows > most {
        true => (PANELS / (together * S::K * S::V::LANES * size_of::<S::W>())).max(8),
        false => panels.max(1),
    };
    let mut pass = Pass { x, w, out, panels: 0..0, steps: 0..0, buffer: [0.0; BUFFER] };
    for first in (0..panels).step_by(group) {
        pass.panels = first..panels.min(first + group);
        for step in (0..steps.max(1)).step_by(together) {
            pass.steps = step..steps.min(step + together);
            let mut row = 0;
            while row < rows {
                row += if const { S::V::REGISTERS == 32 } {
                    match rows - row {
                        12.. => turn::<S, 12, 2>(&mut pass, row),
                        8.. => turn::<S, 8, 2>(&mut pass, row),
                        4.. => turn::<S, 4, 4>(&mut pass, row),
                        2.. => turn::<S, 2, 4>(&mut pass, row),
                        _ => turn::<S, 1, 8>(&mut pass, row),
                    }
                } else {
                    match rows - row {
                        6.. => turn::<S, 6, 1>(&mut pass, row),
                        3.. => turn::<S, 3, 2>(&mut pass, row),
                        _ => turn::<S, 1, 4>(&mut pass, row),
                    }
                };
            }
        }
    }
}

/// Packs values `range` of rows `row..row + m` of `x` as `[range, m]`; zeros behind the last.
fn pack_rows<T: Widen>(
    x: Rows<'_, T>,
    (row, m): (usize, usize),
    range: std::ops::Range<usize>,
    to: &mut [f32],
) {
    for at in 0..m {
        let values = &x.row(row + at)[range.start.min(x.width())..range.end.min(x.width())];
        let column = to[at..].iter_mut().step_by(m);
        let values = values.iter().map(|value| value.wide()).chain(std::iter::once(0.0));
        column.zip(values).for_each(|(to, value)| *to = value);
    }
}

/// M rows past the panels of this turn, P at a time. Gives M.
#[inline(always)]
fn turn<S: Step, const M: usize, const P: usize>(
    pass: &mut Pass<'_, '_, S::W>,
    row: usize,
) -> usize {
    let range = pass.steps.start * S::K..pass.steps.end * S::K;
    let to = &mut pass.buffer[..range.len() * M];
    match pass.x {
        Values::F32(x) => pack_rows(x, (row, M), range, to),
        Values::Bf16(x) => pack_rows(x, (row, M), range, to),
    }
    let mut panel = pass.panels.start;
    while panel + P <= pass.panels.end {
        block::<S, M, P>(pass, row, panel);
        panel += P;
    }
    while panel < pass.panels.end {
        block::<S, M, 1>(pass, row, panel);
        panel += 1;
    }
    M
}

/// M rows by P panels in registers.
#[inline(always)]
fn block<S: Step, const M: usize, const P: usize>(
    pass: &mut Pass<'_, '_, S::W>,
    row: usize,
    panel: usize,
) {
    let lanes = S::V::LANES;
    let of_panel = pass.w.k.div_ceil(S::K) * S::K * lanes;
    let base = pass.w.data[panel * of_panel + pass.steps.start * S::K * lanes..].as_ptr();
    let x = pass.buffer[..pass.steps.len() * S::K * M].as_ptr();
    let first = pass.steps.start == 0;
    let whole = (panel + P) * lanes <= pass.out.width();
    let mut sums = [[S::V::splat(0.0); P]; M];
    if !first {
        for (m, sums) in sums.iter_mut().enumerate() {
            let from = &pass.out.row(row + m)[panel * lanes..];
            for (sum, from) in sums.iter_mut().zip(from.chunks(lanes)) {
                *sum = load_part(from);
            }
        }
    }
    for i in 0..pass.steps.len() {
        // SAFETY: the panels of k · LANES elements lie in `w.data` (asserted in `product`, and the walk
        // takes P panels only where that many are left); the buffer has K · M values for each step.
        unsafe {
            let weights: [S::Loaded; P] =
                std::array::from_fn(|p| S::load(base.add(p * of_panel + i * S::K * lanes)));
            for (m, sums) in sums.iter_mut().enumerate() {
                let value = x.add(i * S::K * M + m);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = S::add(*sum, value, M, weights);
                }
            }
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        let to = &mut pass.out.row(row + m)[panel * lanes..];
        if whole {
            let to = &mut to[..P * lanes];
            for (p, sum) in sums.iter().enumerate() {
                // SAFETY: `to` has P · LANES elements.
                unsafe { sum.store(to.as_mut_ptr().add(p * lanes)) };
            }
        } else {
            for (to, sum) in to.chunks_mut(lanes).zip(sums) {
                store_part(*sum, to);
            }
        }
    }
}

/// The lanes there are; zeros for the others.
#[inline(always)]
fn load_part<V: Lanes>(from: &[f32]) -> V {
    if from.len() >= V::LANES {
        // SAFETY: there are enough.
        return unsafe { V::load_f32(from.as_ptr()) };
    }
    let mut lanes = [0.0; 16];
    lanes[..from.len()].copy_from_slice(from);
    // SAFETY: 16 is the most lanes there are.
    unsafe { V::load_f32(lanes.as_ptr()) }
}

/// As many lanes as `to` takes.
#[inline(always)]
fn store_part<V: Lanes>(sum: V, to: &mut [f32]) {
    let mut lanes = [0.0; 16];
    // SAFETY: 16 is the most lanes there are.
    unsafe { sum.store(lanes.as_mut_ptr()) };
    to.copy_from_slice(&lanes[..to.len()]);
}

#[cfg(test)]
mod tests {
    use super::super::noise;
    use super::*;

    fn packed<W: Widen>(w: &[f32], n: usize, k: usize, lanes: usize) -> Vec<W> {
        let len = panel_elements::<W>(k, lanes);
        let mut data = vec![W::from_f32(f32::NAN); n.div_ceil(lanes) * len];
        for (panel, data) in data.chunks_mut(len.max(1)).enumerate() {
            let value = |lane: usize, i: usize| match panel * lanes + lane {
                row if row < n => w[row * k + i],
                _ => 0.0,
            };
            pack_panel((k, lanes), value, |at, value| data[at] = value);
        }
        data
    }

    fn hold<X: Widen, W: Widen>(level: Level) {
        for (k, n, lanes) in
            [(1, 1, 16), (7, 16, 16), (33, 75, 16), (64, 200, 16), (1031, 40, 16), (40, 8, 8)]
        {
            let w: Vec<f32> =
                noise(n * k, 7).into_iter().map(|v| W::from_f32(v).to_f32()).collect();
            let data = packed::<W>(&w, n, k, lanes);
            let panels = Panels { data: &data, k, lanes };
            for rows in [1, 2, 3, 4, 5, 6, 7, 9, 13, 30] {
                let x: Vec<X> = noise(rows * k, 3).into_iter().map(X::from_f32).collect();
                let mut out = vec![f32::NAN; rows * n];
                product(level, Rows::of(&x, k), panels, RowsMut::of(&mut out, n));
                for row in 0..rows {
                    let mut alone = vec![f32::NAN; n];
                    let one = Rows::of(&x[row * k..(row + 1) * k], k);
                    product(level, one, panels, RowsMut::of(&mut alone, n));
                    assert_eq!(alone, out[row * n..(row + 1) * n], "{level:?} {k} {n} {rows}");
                    for (col, got) in alone.iter().enumerate() {
                        let terms = (0..k).map(|i| {
                            f64::from(x[row * k + i].to_f32()) * f64::from(w[col * k + i])
                        });
                        let want: f64 = terms.sum();
                        assert!((f64::from(*got) - want).abs() < 1e-5 * (k as f64).sqrt());
                    }
                }
            }
        }
    }

    /// Every row count gives the bits that each row gives alone, and values near an f64 sum.
    #[test]
    fn a_product_does_not_depend_on_its_row_count() {
        for level in Level::all() {
            hold::<f32, f32>(level);
            hold::<f32, bf16>(level);
            hold::<bf16, f32>(level);
            hold::<bf16, bf16>(level);
        }
    }

    /// A part of the outputs gives the bits that all of them give.
    #[test]
    fn a_product_does_not_depend_on_its_columns() {
        let (rows, k, n) = (29, 700, 160);
        for level in Level::all() {
            let data = packed::<bf16>(&noise(n * k, 5), n, k, 16);
            let x: Vec<bf16> = noise(rows * k, 9).into_iter().map(bf16::from_f32).collect();
            let mut whole = vec![0.0; rows * n];
            let panels = Panels { data: &data, k, lanes: 16 };
            product(level, Rows::of(&x, k), panels, RowsMut::of(&mut whole, n));
            let mut part = vec![0.0; rows * 48];
            let panels = Panels { data: &data[32 * k..], ..panels };
            product(level, Rows::of(&x, k), panels, RowsMut::of(&mut part, 48));
            for row in 0..rows {
                assert_eq!(whole[row * n + 32..][..48], part[row * 48..][..48]);
            }
        }
    }
}
