//! Host memory as device memory: allocation, and typed views of the spans that a `Checked` operator
//! proved sound.
//!
//! This module holds the crate's only raw views. They lean on four facts:
//!
//! 1. *In bounds*: a `Tensor` cannot be made, narrowed or split so that it leaves its buffer.
//! 2. *Aligned*: buffers start at [`ALIGN`] and a tensor's offset is a multiple of its element size.
//! 3. *Initialised*: memory is allocated zeroed, and every `Element` admits any bits.
//! 4. *Unaliased*: [`Access`] holds the device's lock and views that device's buffers alone, so one
//!    operator at a time views a buffer; within it, outputs share no byte with another operand, which
//!    the operator's `check` proved.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::MutexGuard;

use amphora_hal::{ALIGN, DeviceBytes, Element, HostBytes, Tensor};

use crate::{Cpu, Reserved};

/// Zeroed bytes at [`ALIGN`].
///
/// The allocator is asked for its own alignment and some bytes more, and the start is rounded up here:
/// for a larger alignment it would zero by hand, touching every page of an arena nobody uses yet.
#[derive(Debug)]
pub(crate) struct Memory {
    allocation: NonNull<u8>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are owned by this value alone, like a `Vec<u8>`'s; nothing is tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: through `&Memory` bytes are only read (`bytes`), or viewed under the device's lock.
unsafe impl Sync for Memory {}

impl Memory {
    /// `None` when the system has no such memory.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        let layout = Self::layout(len)?;
        // SAFETY: the layout's size is at least `ALIGN`.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        // `align_offset` may give up (as `usize::MAX`) in constant evaluation alone.
        let skip = allocation.as_ptr().align_offset(ALIGN);
        assert!(skip < ALIGN, "a byte pointer can be aligned");
        // SAFETY: `skip` is below `ALIGN`, and the allocation has `len + ALIGN` bytes.
        let start = unsafe { allocation.add(skip) };
        Some(Memory { allocation, start, len })
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.checked_add(ALIGN)?, 16).ok()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` were allocated zeroed and live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` makes the view the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let layout = Self::layout(self.len).expect("the same layout was made by `zeroed`");
        // SAFETY: `allocation` was allocated with this layout and is freed once, here.
        unsafe { dealloc(self.allocation.as_ptr(), layout) }
    }
}

/// Device bytes: viewed through `Access` alone.
#[derive(Debug)]
pub struct CpuBuffer {
    memory: Memory,
    reserved: Reserved,
}

impl CpuBuffer {
    pub(crate) fn new(memory: Memory, reserved: Reserved) -> Self {
        CpuBuffer { memory, reserved }
    }
}

impl DeviceBytes for CpuBuffer {
    fn len(&self) -> usize {
        self.memory.len
    }
}

/// Host bytes for transfers.
#[derive(Debug)]
pub struct CpuHost(pub(crate) Memory);

impl HostBytes for CpuHost {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// The right to view buffers, held by one operator or transfer at a time.
///
/// Whoever holds it has a `Checked` operator (or, in `upload` and `download`, checked spans), and
/// views each operand once: inputs by `read`, outputs by `write`.
pub(crate) struct Access<'d> {
    device: &'d Cpu,
    _lock: MutexGuard<'d, ()>,
}

impl<'d> Access<'d> {
    /// `lock` is the lock of `device`.
    pub(crate) fn new(device: &'d Cpu, lock: MutexGuard<'d, ()>) -> Self {
        Access { device, _lock: lock }
    }

    fn parts<T: Element>(&self, tensor: &Tensor<Cpu>) -> (*mut T, [usize; 3]) {
        let owner = &tensor.buffer().reserved.device;
        assert!(owner.is_same(self.device), "a tensor is used on the device that it was made on");
        assert_eq!(tensor.dtype(), T::DTYPE, "an operator reads a tensor at its own type");
        let (rows, pitch, width) =
            tensor.shape().as_rows().expect("every check demands dense rows at one pitch");
        // Rows of nothing take no bytes, so no pitch may lead out of the buffer.
        let pitch = if width == 0 { 0 } else { pitch };
        // SAFETY: fact 1: the offset stays within the buffer's one allocation.
        let start = unsafe { tensor.buffer().memory.start.as_ptr().add(tensor.offset()) };
        (start.cast(), [rows, pitch, width])
    }

    /// An input, as rows of everything inside its outermost dimension.
    pub(crate) fn read<'a, T: Element>(&'a self, tensor: &'a Tensor<Cpu>) -> Rows<'a, T> {
        let (start, [rows, pitch, width]) = self.parts::<T>(tensor);
        Rows { start, rows, pitch, width, life: PhantomData }
    }

    /// An input without gaps.
    pub(crate) fn slice<'a, T: Element>(&'a self, tensor: &'a Tensor<Cpu>) -> &'a [T] {
        assert!(tensor.shape().is_dense(), "the check demands it dense");
        let (start, _) = self.parts::<T>(tensor);
        // SAFETY: facts 1 to 4; without gaps the elements are one stretch.
        unsafe { std::slice::from_raw_parts(start, tensor.shape().elements()) }
    }

    /// An output, as rows of everything inside its outermost dimension.
    pub(crate) fn write<'a, T: Element>(&'a self, tensor: &'a mut Tensor<Cpu>) -> RowsMut<'a, T> {
        let (start, [rows, pitch, width]) = self.parts::<T>(tensor);
        RowsMut { start, rows, pitch, width, life: PhantomData }
    }

    /// An output without gaps. The borrow that makes it exclusive is the operator's own `&mut` field:
    /// handles are shared, so exclusiveness is fact 4, not a borrow of the handle.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn slice_mut<'a, T: Element>(&'a self, tensor: &'a Tensor<Cpu>) -> &'a mut [T] {
        assert!(tensor.shape().is_dense(), "the check demands it dense");
        let (start, _) = self.parts::<T>(tensor);
        // SAFETY: facts 1 to 4; the tensor is an output of the operator that holds this access.
        unsafe { std::slice::from_raw_parts_mut(start, tensor.shape().elements()) }
    }
}

/// Rows of an input at one pitch. The gaps between rows may belong to an output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    start: *const T,
    rows: usize,
    pitch: usize,
    width: usize,
    life: PhantomData<&'a [T]>,
}

// SAFETY: it is `&[T]` in pieces; `T: Sync` makes sharing it sound.
unsafe impl<T: Sync> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// `data` cut into rows of `width`.
    pub(crate) fn of(data: &'a [T], width: usize) -> Self {
        let rows = data.len() / width.max(1);
        Rows { start: data.as_ptr(), rows, pitch: width, width, life: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The rows of `range`.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows);
        let skip = if range.is_empty() { 0 } else { range.start * self.pitch };
        // SAFETY: `skip` is the start of a row of the span, or 0 when no row is left.
        let start = unsafe { self.start.add(skip) };
        Rows { start, rows: range.len(), ..*self }
    }

    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows);
        // SAFETY: the row lies in the span that `start`, `rows` and `pitch` were made from.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.pitch), self.width) }
    }
}

/// Rows of an output at one pitch; the only way to those bytes.
#[derive(Debug)]
pub(crate) struct RowsMut<'a, T> {
    start: *mut T,
    rows: usize,
    pitch: usize,
    width: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it is `&mut [T]` in pieces; `T: Send` makes moving it sound.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}

impl<'a, T> RowsMut<'a, T> {
    /// `data` cut into rows of `width`.
    pub(crate) fn of(data: &'a mut [T], width: usize) -> Self {
        let rows = data.len() / width.max(1);
        RowsMut { start: data.as_mut_ptr(), rows, pitch: width, width, life: PhantomData }
    }

    /// So many rows without elements.
    pub(crate) fn of_nothing(rows: usize) -> Self {
        let start = NonNull::dangling().as_ptr();
        RowsMut { start, rows, pitch: 0, width: 0, life: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row lies in the span that this view was made from, and `&mut self` lends it out
        // once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.pitch), self.width) }
    }

    /// A shorter-lived view of the same rows.
    pub(crate) fn reborrow(&mut self) -> RowsMut<'_, T> {
        RowsMut { life: PhantomData, ..*self }
    }

    /// A view of each row.
    pub(crate) fn each_row(self) -> Vec<Self> {
        let mut left = self;
        let mut rows = Vec::with_capacity(left.rows);
        while left.rows > 0 {
            let (row, rest) = left.split_rows(1);
            rows.push(row);
            left = rest;
        }
        rows
    }

    /// Columns before and from `at`.
    pub(crate) fn split_columns(self, at: usize) -> (Self, Self) {
        assert!(at <= self.width);
        // SAFETY: `at` is within a row, so the offset stays in (or one past) the span.
        let right = unsafe { self.start.add(if self.rows == 0 { 0 } else { at }) };
        (RowsMut { width: at, ..self }, RowsMut { start: right, width: self.width - at, ..self })
    }

    /// Rows before and from `at`.
    pub(crate) fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows);
        let skip = if at == self.rows { 0 } else { at * self.pitch };
        // SAFETY: `skip` is the start of a row of the span, or 0 when no row is left.
        let below = unsafe { self.start.add(skip) };
        (RowsMut { rows: at, ..self }, RowsMut { start: below, rows: self.rows - at, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_views_cover_the_rows_once() {
        let mut data: Vec<u32> = vec![0; 15];
        let rows = RowsMut::of(&mut data, 5);
        let (top, bottom) = rows.split_rows(1);
        for (value, part) in [(1, top), (10, bottom)] {
            let (mut left, mut right) = part.split_columns(2);
            for row in 0..left.len() {
                left.row(row).iter_mut().for_each(|v| *v += value);
                right.row(row).iter_mut().for_each(|v| *v += 2 * value);
            }
        }
        assert_eq!(data, [1, 1, 2, 2, 2, 10, 10, 20, 20, 20, 10, 10, 20, 20, 20]);
    }

    #[test]
    fn memory_is_aligned_and_zeroed() {
        let memory = Memory::zeroed(1000).expect("1 kB");
        assert!(memory.bytes().iter().all(|&b| b == 0));
        assert_eq!(memory.bytes().as_ptr() as usize % ALIGN, 0);
        assert!(Memory::zeroed(usize::MAX / 2).is_none());
        assert!(Memory::zeroed(usize::MAX).is_none());
    }

    /// A large reservation that nobody touches costs no resident memory.
    #[test]
    #[cfg(target_os = "linux")]
    fn untouched_memory_is_not_resident() {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
            pages.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok()).expect("a number") * 4096
        };
        let before = resident();
        let memory = Memory::zeroed(1 << 30).expect("1 GiB of addresses");
        assert!(resident() < before + (64 << 20));
        drop(memory);
    }
}
