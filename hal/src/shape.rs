//! Shapes of up to four dimensions, their strides, and the bytes they span.

use crate::error::{Error, Result};

/// Most dimensions a tensor may have.
pub const MAX_DIMS: usize = 4;

/// Extents and strides, both in elements, outermost first. The innermost stride is always 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    rank: u8,
    extents: [usize; MAX_DIMS],
    strides: [usize; MAX_DIMS],
}

impl Shape {
    /// A dense row-major shape.
    ///
    /// # Errors
    /// No dimension, more than [`MAX_DIMS`], or a product that overflows.
    pub fn dense(extents: &[usize]) -> Result<Self> {
        let bad = |what: &str| Error::invalid("shape", format!("{extents:?}: {what}"));
        if extents.is_empty() || extents.len() > MAX_DIMS {
            return Err(bad("1 to 4 dimensions are allowed"));
        }
        let mut shape =
            Shape { rank: extents.len() as u8, extents: [1; MAX_DIMS], strides: [1; MAX_DIMS] };
        let mut stride = 1usize;
        for (i, &extent) in extents.iter().enumerate().rev() {
            shape.extents[i] = extent;
            shape.strides[i] = stride;
            stride = stride.checked_mul(extent.max(1)).ok_or_else(|| bad("the size overflows"))?;
        }
        Ok(shape)
    }

    /// Extents, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.extents[..self.rank as usize]
    }

    /// Strides in elements, outermost first.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank as usize]
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether the elements lie without a gap.
    pub fn is_dense(&self) -> bool {
        let mut stride = 1;
        for (&extent, &s) in self.dims().iter().zip(self.strides()).rev() {
            if extent > 1 && s != stride {
                return false;
            }
            stride *= extent.max(1);
        }
        true
    }

    /// Elements from the first to one past the last; 0 when there is none.
    pub fn span(&self) -> usize {
        if self.elements() == 0 {
            return 0;
        }
        1 + self.dims().iter().zip(self.strides()).map(|(e, s)| (e - 1) * s).sum::<usize>()
    }

    /// The same tensor seen as rows: `(rows, pitch, width)` in elements, where everything inside
    /// the outermost dimension lies without a gap. `None` when it does not.
    pub fn as_rows(&self) -> Option<(usize, usize, usize)> {
        if self.rank == 1 {
            return Some((1, self.extents[0], self.extents[0]));
        }
        let inner = Shape {
            rank: self.rank - 1,
            extents: shifted(&self.extents),
            strides: shifted(&self.strides),
        };
        inner.is_dense().then(|| (self.extents[0], self.strides[0], inner.elements()))
    }

    /// The part `[start, start + len)` of dimension `dim`, with the element offset of its first.
    ///
    /// # Errors
    /// The range leaves the dimension.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<(Self, usize)> {
        let extent = self.dims().get(dim).copied().unwrap_or(0);
        if dim >= self.rank as usize || start.checked_add(len).is_none_or(|end| end > extent) {
            return Err(Error::invalid(
                "narrow",
                format!("{start}+{len} of dimension {dim} in {self}"),
            ));
        }
        let mut shape = *self;
        shape.extents[dim] = len;
        // A part without elements lies nowhere; a skip could lead out of the buffer.
        let skip = if shape.elements() == 0 { 0 } else { start * self.strides[dim] };
        Ok((shape, skip))
    }

    /// Splits the innermost dimension of width `a * b` into `[a, b]`.
    ///
    /// # Errors
    /// The width is no multiple of `inner`, or there are four dimensions already.
    pub fn split_last(&self, inner: usize) -> Result<Self> {
        let rank = self.rank as usize;
        let width = self.extents[rank - 1];
        if rank == MAX_DIMS || inner == 0 || !width.is_multiple_of(inner) {
            return Err(Error::invalid("split_last", format!("{self} by {inner}")));
        }
        let mut shape = *self;
        shape.rank += 1;
        shape.extents[rank - 1] = width / inner;
        shape.strides[rank - 1] = inner;
        shape.extents[rank] = inner;
        shape.strides[rank] = 1;
        Ok(shape)
    }
}

fn shifted(from: &[usize; MAX_DIMS]) -> [usize; MAX_DIMS] {
    [from[1], from[2], from[3], 1]
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())?;
        if !self.is_dense() {
            write!(f, " strides {:?}", self.strides())?;
        }
        Ok(())
    }
}

/// One operand as bytes of a buffer: where it starts, and how its rows repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub start: usize,
    /// Bytes from the first to one past the last.
    pub len: usize,
    /// `(pitch, width)` of the rows in bytes, where the operand has that form.
    pub rows: Option<(usize, usize)>,
}

impl Extent {
    /// Whether two operands of one buffer share a byte. Operands that interleave as columns of the
    /// same rows (q and k of one qkv tensor) do not; anything less regular is judged by its span.
    pub fn overlaps(&self, other: &Extent) -> bool {
        let (a, b) = if self.start <= other.start { (self, other) } else { (other, self) };
        if a.len == 0 || b.len == 0 || a.start + a.len <= b.start {
            return false;
        }
        match (a.rows, b.rows) {
            (Some((pitch, a_width)), Some((b_pitch, b_width))) if pitch == b_pitch && pitch > 0 => {
                let shift = (b.start - a.start) % pitch;
                !(shift >= a_width && shift + b_width <= pitch)
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: usize, rows: usize, pitch: usize, width: usize) -> Extent {
        Extent { start, len: (rows - 1) * pitch + width, rows: Some((pitch, width)) }
    }

    #[test]
    fn columns_of_the_same_rows_do_not_overlap() {
        let (q, k) = (extent(0, 3, 12, 8), extent(8, 3, 12, 4));
        assert!(!q.overlaps(&k) && !k.overlaps(&q));
        assert!(q.overlaps(&extent(7, 3, 12, 4)));
        assert!(q.overlaps(&extent(8, 3, 12, 5)), "wraps into the next row");
        assert!(q.overlaps(&extent(8, 3, 16, 4)), "another pitch is judged by its span");
        assert!(!extent(0, 1, 8, 8).overlaps(&extent(8, 1, 8, 8)));
    }

    /// The judgement must agree with a count of bytes wherever pitches are equal.
    #[test]
    fn overlap_agrees_with_counting_bytes() {
        for shift in 0..40 {
            for (wa, wb) in [(1, 1), (3, 5), (8, 4), (12, 12)] {
                let (a, b) = (extent(0, 3, 12, wa), extent(shift, 2, 12, wb));
                let bytes = |e: &Extent, rows: usize, w: usize| {
                    (0..rows).flat_map(|r| (0..w).map(move |c| (r, c))).fold(
                        std::collections::BTreeSet::new(),
                        |mut set, (r, c)| {
                            set.insert(e.start + r * 12 + c);
                            set
                        },
                    )
                };
                let shared = !bytes(&a, 3, wa).is_disjoint(&bytes(&b, 2, wb));
                assert!(!shared || a.overlaps(&b), "missed: shift {shift}, widths {wa} {wb}");
                if b.start < a.start + a.len && shift % 12 + wb <= 12 {
                    // Rows of `b` beyond the last of `a` may be judged too strictly, never too mildly.
                    assert!(a.overlaps(&b) || !shared);
                }
            }
        }
    }

    #[test]
    fn an_empty_part_skips_nothing() {
        let columns = Shape::dense(&[3, 12]).expect("small").narrow(1, 8, 2).expect("inside").0;
        assert_eq!(columns.narrow(0, 3, 0).expect("inside").1, 0);
        assert_eq!(Shape::dense(&[3, 0]).expect("small").narrow(0, 2, 1).expect("inside").1, 0);
    }

    #[test]
    fn narrowing_and_splitting_keep_strides() {
        let qkv = Shape::dense(&[5, 12]).expect("small");
        let (k, offset) = qkv.narrow(1, 8, 2).expect("inside");
        assert_eq!((offset, k.dims(), k.strides()), (8, &[5, 2][..], &[12, 1][..]));
        let heads = k.split_last(1).expect("divides");
        assert_eq!(heads.dims(), &[5, 2, 1]);
        assert_eq!(heads.as_rows(), Some((5, 12, 2)));
        assert!(qkv.narrow(1, 8, 5).is_err() && qkv.split_last(5).is_err());
        assert_eq!(qkv.narrow(1, 8, 2).expect("inside").0.span(), 4 * 12 + 2);
    }
}
