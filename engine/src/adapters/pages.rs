//! The arena of adapter memory: equal pages, each cut into equal blocks of one size class.
//!
//! A page is at least as large as the model's largest block at the rank limit, serves one size class
//! at a time and returns whole when its last block is freed. So memory moves from one class to another
//! without moving a byte, and an adapter pays for its blocks alone. Only offsets are kept here.

use std::collections::BTreeMap;

/// Blocks start at multiples of this many bytes; the LoRA table counts offsets in it.
pub const UNIT_BYTES: usize = amphora_hal::ARENA_UNIT;

/// A block in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    /// Bytes from the start of the arena, a multiple of `UNIT_BYTES`.
    pub offset: usize,
    /// Bytes that were asked for; the size class may be larger by at most an eighth.
    pub bytes: usize,
}

/// Why blocks could not be taken. `NoRoom` may pass when other blocks are freed, the others never do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    /// One block is larger than a page.
    #[error("a block of {bytes} bytes is larger than an arena page of {page_bytes} bytes")]
    BlockTooLarge {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// The list needs more pages than the whole arena has.
    #[error("{wanted} arena pages are needed, the whole arena has {total}")]
    NeverFits {
        /// Pages needed in an empty arena.
        wanted: usize,
        /// Pages in the arena.
        total: usize,
    },
    /// The list does not fit beside what is there now.
    #[error("{wanted} more arena pages are needed, {free} are free")]
    NoRoom {
        /// Further pages needed.
        wanted: usize,
        /// Pages free now.
        free: usize,
    },
}

/// Bytes of a page in use by one size class.
#[derive(Debug)]
struct Page {
    class_units: usize,
    /// Free places in the page, taken from the end.
    free: Vec<usize>,
    capacity: usize,
}

/// What the arena holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PagesReport {
    /// Bytes of the blocks as asked for.
    pub block_bytes: usize,
    /// Bytes of the blocks rounded to their size classes.
    pub class_bytes: usize,
    /// Bytes of all pages that hold a block.
    pub page_bytes: usize,
    /// Bytes of the arena.
    pub arena_bytes: usize,
}

/// Allocator of blocks in the arena.
#[derive(Debug)]
pub struct Pages {
    page_units: usize,
    /// `None`: a free page.
    pages: Vec<Option<Page>>,
    free_pages: Vec<usize>,
    /// Pages of each class that have room, by class.
    open: BTreeMap<usize, Vec<usize>>,
    report: PagesReport,
}

/// Units of the size class that serves `bytes`: four significant bits, hence at most an eighth more.
fn class_units(bytes: usize) -> usize {
    let units = bytes.div_ceil(UNIT_BYTES).max(1);
    let step = 1usize << units.ilog2().saturating_sub(3);
    units.next_multiple_of(step)
}

impl Pages {
    /// An arena of `arena_bytes` cut into pages that can hold a block of `largest_block` bytes; a last
    /// stretch shorter than a page is left unused.
    pub fn new(arena_bytes: usize, largest_block: usize) -> Self {
        let page_units = class_units(largest_block);
        let count = arena_bytes / (page_units * UNIT_BYTES);
        Pages {
            page_units,
            pages: (0..count).map(|_| None).collect(),
            free_pages: (0..count).rev().collect(),
            open: BTreeMap::new(),
            report: PagesReport { arena_bytes, ..PagesReport::default() },
        }
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        self.page_units * UNIT_BYTES
    }

    /// What is in use.
    pub fn report(&self) -> PagesReport {
        self.report
    }

    /// Takes a block for each entry of `bytes`, in order, or none at all.
    pub fn take(&mut self, bytes: &[usize]) -> Result<Vec<Block>, PagesError> {
        self.check(bytes)?;
        Ok(bytes.iter().map(|&bytes| self.take_one(bytes)).collect())
    }

    /// Gives blocks back. Each must have come from `take` and not have been given back before.
    pub fn give_back(&mut self, blocks: &[Block]) {
        for block in blocks {
            self.free_one(block);
        }
    }

    /// Whether `bytes` would fit an arena with nothing else in it.
    pub fn check_alone(&self, bytes: &[usize]) -> Result<(), PagesError> {
        let wanted: usize = self
            .by_class(bytes)?
            .iter()
            .map(|(&class, &blocks)| self.pages_for(class, blocks))
            .sum();
        match wanted > self.pages.len() {
            true => Err(PagesError::NeverFits { wanted, total: self.pages.len() }),
            false => Ok(()),
        }
    }

    /// Whether `bytes` fits now, said before anything is taken.
    fn check(&self, bytes: &[usize]) -> Result<(), PagesError> {
        self.check_alone(bytes)?;
        let wanted: usize = self
            .by_class(bytes)?
            .iter()
            .map(|(&class, &blocks)| {
                self.pages_for(class, blocks.saturating_sub(self.room_in_open_pages(class)))
            })
            .sum();
        match wanted > self.free_pages.len() {
            true => Err(PagesError::NoRoom { wanted, free: self.free_pages.len() }),
            false => Ok(()),
        }
    }

    fn pages_for(&self, class: usize, blocks: usize) -> usize {
        blocks.div_ceil(self.page_units / class)
    }

    /// Number of blocks of each size class.
    fn by_class(&self, bytes: &[usize]) -> Result<BTreeMap<usize, usize>, PagesError> {
        let mut blocks = BTreeMap::new();
        for &bytes in bytes {
            let class = class_units(bytes);
            if class > self.page_units {
                return Err(PagesError::BlockTooLarge { bytes, page_bytes: self.page_bytes() });
            }
            *blocks.entry(class).or_default() += 1;
        }
        Ok(blocks)
    }

    fn room_in_open_pages(&self, class: usize) -> usize {
        let open = self.open.get(&class).map_or(&[][..], Vec::as_slice);
        open.iter().filter_map(|&page| self.pages[page].as_ref()).map(|page| page.free.len()).sum()
    }

    fn take_one(&mut self, bytes: usize) -> Block {
        let class = class_units(bytes);
        let open = self.open.entry(class).or_default();
        let index = match open.last() {
            Some(&index) => index,
            None => {
                let index = self.free_pages.pop().expect("`check` counted the free pages");
                let capacity = self.page_units / class;
                let free = (0..capacity).rev().collect();
                self.pages[index] = Some(Page { class_units: class, free, capacity });
                self.report.page_bytes += self.page_units * UNIT_BYTES;
                open.push(index);
                index
            }
        };
        let page = self.pages[index].as_mut().expect("an open page is in use");
        let place = page.free.pop().expect("an open page has room");
        if page.free.is_empty() {
            open.pop();
        }
        self.report.block_bytes += bytes;
        self.report.class_bytes += class * UNIT_BYTES;
        Block { offset: (index * self.page_units + place * class) * UNIT_BYTES, bytes }
    }

    fn free_one(&mut self, block: &Block) {
        let unit = block.offset / UNIT_BYTES;
        let (index, within) = (unit / self.page_units, unit % self.page_units);
        let page = self.pages[index].as_mut().expect("a block lies in a page that is in use");
        let class = page.class_units;
        self.report.block_bytes -= block.bytes;
        self.report.class_bytes -= class * UNIT_BYTES;
        let was_full = page.free.is_empty();
        page.free.push(within / class);
        let now_empty = page.free.len() == page.capacity;
        let open = self.open.entry(class).or_default();
        if now_empty {
            open.retain(|&other| other != index);
            self.pages[index] = None;
            self.free_pages.push(index);
            self.report.page_bytes -= self.page_units * UNIT_BYTES;
        } else if was_full {
            open.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn a_class_is_at_most_an_eighth_larger() {
        for units in 1..5000 {
            let class = class_units(units * UNIT_BYTES);
            assert!(class >= units && class * 8 <= units * 9, "{units} → {class}");
            assert_eq!(class_units(class * UNIT_BYTES), class);
        }
        assert_eq!(class_units(1), 1);
    }

    #[test]
    fn what_never_fits_is_told_from_what_does_not_fit_now() {
        let mut pages = Pages::new(4 * 1024, 1024);
        let err = pages.take(&[2048]).unwrap_err();
        assert_eq!(err, PagesError::BlockTooLarge { bytes: 2048, page_bytes: 1024 });
        assert_eq!(
            pages.take(&[1024; 5]).unwrap_err(),
            PagesError::NeverFits { wanted: 5, total: 4 }
        );
        let held = pages.take(&[1024; 3]).unwrap();
        assert_eq!(pages.take(&[1024; 2]).unwrap_err(), PagesError::NoRoom { wanted: 2, free: 1 });
        pages.give_back(&held);
        assert_eq!(pages.take(&[1024; 4]).unwrap().len(), 4);
    }

    #[test]
    fn a_refused_list_takes_nothing() {
        let mut pages = Pages::new(2 * 1024, 1024);
        let held = pages.take(&[512]).unwrap();
        let before = pages.report();
        assert!(pages.take(&[512, 1024, 1024]).is_err());
        assert_eq!(pages.report(), before);
        pages.give_back(&held);
        assert_eq!(pages.report().page_bytes, 0);
    }

    #[test]
    fn random_use_never_overlaps_and_returns_whole() {
        let mut rng = Rng::new(3);
        for _ in 0..30 {
            let largest = (1 + rng.below(40)) * UNIT_BYTES;
            let mut pages = Pages::new(largest * (4 + rng.below(30)), largest);
            let mut held: Vec<Vec<Block>> = Vec::new();
            let mut bytes = vec![false; pages.report().arena_bytes / UNIT_BYTES];
            for _ in 0..300 {
                if rng.below(5) < 3 {
                    let list: Vec<usize> =
                        (0..1 + rng.below(12)).map(|_| 1 + rng.below(largest)).collect();
                    if let Ok(blocks) = pages.take(&list) {
                        for (block, &asked) in blocks.iter().zip(&list) {
                            assert_eq!((block.bytes, block.offset % UNIT_BYTES), (asked, 0));
                            mark(&mut bytes, block, true);
                        }
                        held.push(blocks);
                    }
                } else if !held.is_empty() {
                    let blocks = held.swap_remove(rng.below(held.len()));
                    blocks.iter().for_each(|block| mark(&mut bytes, block, false));
                    pages.give_back(&blocks);
                }
                let report = pages.report();
                let sum: usize = held.iter().flatten().map(|block| block.bytes).sum();
                assert_eq!(report.block_bytes, sum);
                assert!(report.class_bytes <= report.page_bytes);
                assert!(report.page_bytes <= report.arena_bytes);
            }
            held.iter().for_each(|blocks| pages.give_back(blocks));
            let empty =
                PagesReport { arena_bytes: pages.report().arena_bytes, ..Default::default() };
            assert_eq!(pages.report(), empty);
            assert_eq!(pages.free_pages.len(), pages.pages.len());
            assert!(pages.open.values().all(Vec::is_empty));
        }
    }

    fn mark(bytes: &mut [bool], block: &Block, used: bool) {
        let first = block.offset / UNIT_BYTES;
        for unit in &mut bytes[first..first + block.bytes.div_ceil(UNIT_BYTES)] {
            assert_ne!(*unit, used, "blocks overlap");
            *unit = used;
        }
    }
}
