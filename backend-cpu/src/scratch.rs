//! A stream's workspace, handed out front to back within one operator.

use bytemuck::Pod;

/// Workspace that is left.
#[derive(Debug)]
pub(crate) struct Scratch<'a>(&'a mut [u8]);

/// Each piece starts at a multiple of this, so that threads share no cache line.
const PIECE: usize = 64;

/// Bytes that `len` elements of type T take.
pub(crate) fn piece<T>(len: usize) -> usize {
    (len * size_of::<T>()).next_multiple_of(PIECE)
}

impl<'a> Scratch<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Scratch(bytes)
    }

    /// `len` elements with whatever they held.
    ///
    /// # Panics
    /// The stream was made with less than [`crate::ops::workspace`] says: a bug of its maker.
    pub(crate) fn take<T: Pod>(&mut self, len: usize) -> &'a mut [T] {
        let bytes = piece::<T>(len);
        assert!(
            bytes <= self.0.len(),
            "the stream's workspace lacks {} bytes: it was made for smaller bounds",
            bytes - self.0.len()
        );
        let (front, rest) = std::mem::take(&mut self.0).split_at_mut(bytes);
        self.0 = rest;
        &mut bytemuck::cast_slice_mut(front)[..len]
    }
}
