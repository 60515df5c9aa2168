//! The host image of an adapter: its factors as blocks in a device's layout, in host pages ready to
//! be copied, and the table rows that will point at them.
//!
//! A block is one factor at its rank class, a multiple of [`ARENA_UNIT`] bytes. Gate and up of a fused
//! file name the same block A. Where blocks lie in the arena is the adapter pool's business.

use amphora_hal::{
    ARENA_UNIT, Backend, DType, Error, Factor, HostBytes, HostFactor, LoraShape, RankClass, Result,
};

use crate::adapter::{AdapterFactors, Matrix, ModuleFactor};
use crate::lora_slices::LoraSlices;

/// Host bytes of one page, unless a single block is larger.
const PAGE_BYTES: usize = 4 << 20;

/// An adapter in host memory, packed.
#[derive(Debug)]
pub struct AdapterImage<B: Backend> {
    /// The bytes; a transfer takes a page and gives it back.
    pub pages: Vec<B::Host>,
    /// The blocks, each in one page.
    pub blocks: Vec<ImageBlock>,
    /// The rows of a slot that this adapter touches.
    pub rows: Vec<ImageRow>,
}

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageBlock {
    /// Its page.
    pub page: usize,
    /// First byte in the page, a multiple of [`ARENA_UNIT`].
    pub offset: usize,
    /// Bytes, a multiple of [`ARENA_UNIT`].
    pub bytes: usize,
}

/// One table row, with numbers of blocks where the table has offsets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageRow {
    /// Row within the slot.
    pub row: usize,
    /// Block A.
    pub a: usize,
    /// Block B.
    pub b: usize,
    /// Rank class of both.
    pub class: RankClass,
    /// Multiplies the intermediate.
    pub scale: f32,
}

/// One factor that becomes a block.
struct Source<'a> {
    factor: HostFactor<'a>,
    /// Exact bytes in the device's layout.
    bytes: usize,
}

impl<B: Backend> AdapterImage<B> {
    /// Packs checked factors for `device`, in the element type of its LoRA blocks.
    ///
    /// # Errors
    /// A rank above the device's largest class, a value that overflows `dtype`, or no host memory.
    pub fn pack(
        device: &B,
        factors: &AdapterFactors,
        slices: &LoraSlices,
        dtype: DType,
    ) -> Result<Self> {
        let mut sources = Vec::new();
        let mut block_of_shrink = vec![None; factors.shrinks.len()];
        let mut rows = Vec::with_capacity(factors.modules.len());
        for module in &factors.modules {
            let class = class_of(device, module)?;
            let slice = slices.id(module.layer, module.target).ok_or_else(|| {
                Error::invalid("adapter image", format!("no layer {}", module.layer))
            })?;
            let mut push = |factor: Factor, matrix| -> Result<usize> {
                sources.push(source(device, factor, matrix, class, dtype)?);
                Ok(sources.len() - 1)
            };
            let a = match block_of_shrink[module.shrink] {
                Some(block) => block,
                None => push(Factor::A, factors.a(module))?,
            };
            block_of_shrink[module.shrink] = Some(a);
            rows.push(ImageRow {
                row: slice.row() + module.expert.unwrap_or(0),
                a,
                b: push(Factor::B, &module.b)?,
                class,
                scale: module.scale,
            });
        }
        let (blocks, page_bytes) = place(&sources);
        let mut pages = page_bytes
            .iter()
            .map(|&bytes| device.reserve_host(bytes))
            .collect::<Result<Vec<_>>>()?;
        for (block, source) in blocks.iter().zip(&sources) {
            let page = pages[block.page].bytes_mut();
            let into = &mut page[block.offset..block.offset + source.bytes];
            device.pack_lora(&source.factor, into)?;
        }
        Ok(AdapterImage { pages, blocks, rows })
    }

    /// Bytes of all blocks: what the adapter costs on the device.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.bytes).sum()
    }
}

fn class_of<B: Backend>(device: &B, module: &ModuleFactor) -> Result<RankClass> {
    device.caps().rank_class(module.rank).ok_or_else(|| {
        let rank = module.rank;
        Error::invalid("adapter image", format!("no rank class holds rank {rank}"))
    })
}

fn source<'a, B: Backend>(
    device: &B,
    factor: Factor,
    matrix: &'a Matrix,
    class: RankClass,
    dtype: DType,
) -> Result<Source<'a>> {
    let (rank, width) = match factor {
        Factor::A => (matrix.rows, matrix.cols),
        Factor::B => (matrix.cols, matrix.rows),
    };
    let shape = LoraShape { factor, width, dtype };
    Ok(Source {
        factor: HostFactor { shape, class, rank, data: &matrix.data },
        bytes: device.lora_block(shape, class)?,
    })
}

/// Lays blocks one after another, opening a page when one is full; gives the pages' sizes too.
fn place(sources: &[Source<'_>]) -> (Vec<ImageBlock>, Vec<usize>) {
    let mut pages: Vec<usize> = Vec::new();
    let mut blocks = Vec::with_capacity(sources.len());
    for source in sources {
        let bytes = source.bytes.next_multiple_of(ARENA_UNIT);
        match pages.last_mut() {
            Some(used) if *used + bytes <= PAGE_BYTES => *used += bytes,
            _ => pages.push(bytes),
        }
        let page = pages.len() - 1;
        blocks.push(ImageBlock { page, offset: pages[page] - bytes, bytes });
    }
    (blocks, pages)
}
