//! The device side of the adapter store: slots, blocks, the copy stream and table rows.
//!
//! Promotion is all or nothing. Every block and a slot are taken, evicting what nobody uses, or nothing
//! is. The image is copied on the copy stream; when the host has *seen* all copies pass, the slot's rows
//! are written on the compute stream ahead of the next step. So the compute stream never waits for a
//! copy, and no step sees half an adapter.

mod host;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use amphora_hal::{
    self as hal, ARENA_UNIT, Backend, Error, InFlight, LoraRow, LoraTable, RankClass, Slot, Span,
};
use amphora_model::adapter_image::AdapterImage;

use super::images::Images;
use super::ledger::{AdapterKey, AdapterLine, Ledger, LedgerError, Pin, Place, Residency};
use super::pages::{Block, Pages, PagesError, PagesReport};
use super::reader::{Origin, Reader};
use crate::step::Step;
pub use host::HostTier;

/// An adapter's blocks on the device.
#[derive(Debug)]
struct OnDevice {
    blocks: Vec<Block>,
    classes: BTreeSet<RankClass>,
}

impl OnDevice {
    fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.bytes).sum()
    }
}

/// An adapter whose copies are under way; its image's pages travel with them.
#[derive(Debug)]
struct Loading<B: Backend> {
    key: AdapterKey,
    copies: Vec<InFlight<B>>,
}

/// What the adapters of a step are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdaptersInUse {
    /// Rank classes of their blocks.
    pub classes: BTreeSet<RankClass>,
    /// Bytes of their blocks.
    pub bytes: usize,
}

/// Why adapter memory could not be set up or filled.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The device.
    #[error(transparent)]
    Device(#[from] Error),
    /// A move that the ledger does not know: a bug.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// All adapters: their state, images and blocks.
pub struct AdapterPool<B: Backend> {
    // Copies end first, then the stream they are on, then the memory they use.
    loading: VecDeque<Loading<B>>,
    rows_in_flight: VecDeque<InFlight<B>>,
    copy_stream: B::Stream,
    table: LoraTable<B>,
    images: Images<B>,
    reader: Reader<B>,
    /// Adapters read again since the start.
    reads: u64,
    row_buffers: Vec<B::Host>,
    ledger: Ledger,
    pages: Pages,
    on_device: BTreeMap<AdapterKey, OnDevice>,
    /// Staged and not yet tried: brought up while there is room, evicting nothing.
    fresh: VecDeque<AdapterKey>,
    device: B,
}

/// What a turn of the pool found.
#[derive(Debug, Default)]
pub struct Polled {
    /// Versions that are gone.
    pub over: Vec<AdapterKey>,
    /// Versions that requests wait for and whose files are not there as they were, and why.
    pub unreadable: Vec<(AdapterKey, String)>,
}

/// What the loop tells the pool each turn.
#[derive(Debug, Clone, Copy)]
pub struct Demand<'a> {
    /// Adapters that waiting requests need, first come first.
    pub wanted: &'a [AdapterKey],
    /// The last step whose results were seen.
    pub completed: Step,
}

impl<B: Backend> AdapterPool<B> {
    /// An empty pool over a table of zeroed memory.
    pub fn new(
        device: B,
        copy_stream: B::Stream,
        (table, pages): (LoraTable<B>, Pages),
        host: HostTier<B>,
    ) -> Self {
        AdapterPool {
            ledger: Ledger::new(table.slots()),
            pages,
            images: Images::new(host.bytes),
            reader: host.reader,
            reads: 0,
            on_device: BTreeMap::new(),
            loading: VecDeque::new(),
            fresh: VecDeque::new(),
            rows_in_flight: VecDeque::new(),
            row_buffers: Vec::new(),
            table,
            copy_stream,
            device,
        }
    }

    /// The table that operators read.
    pub fn table(&self) -> &LoraTable<B> {
        &self.table
    }

    /// Bytes of an arena page.
    pub fn page_bytes(&self) -> usize {
        self.pages.page_bytes()
    }

    /// Takes a packed adapter in under `name`; an older version drains. With an origin its image may be
    /// given up and read again.
    ///
    /// # Errors
    /// It would not fit the arena if it were alone there.
    pub fn stage(
        &mut self,
        name: &str,
        image: AdapterImage<B>,
        origin: Option<Origin>,
    ) -> Result<AdapterKey, PagesError> {
        self.pages.check_alone(&block_bytes(&image))?;
        let key = self.ledger.stage(name);
        self.images.insert(key.clone(), image, origin);
        self.fresh.push_back(key.clone());
        Ok(key)
    }

    /// Takes an adapter out of the names; see `Ledger::retire`.
    ///
    /// # Errors
    /// There is no such name.
    pub fn retire(&mut self, name: &str) -> Result<AdapterKey, LedgerError> {
        self.ledger.retire(name)
    }

    /// Pins the version that a new request is to use.
    ///
    /// # Errors
    /// There is no such name.
    pub fn pin(&self, name: &str) -> Result<Pin, LedgerError> {
        self.ledger.pin(name)
    }

    /// See `Ledger::residency`.
    pub fn residency(&self, key: &AdapterKey) -> Residency {
        self.ledger.residency(key)
    }

    /// Notes that `step` reads the blocks of `slot`.
    pub fn used(&mut self, slot: Slot, step: Step) {
        self.ledger.used(slot, step);
    }

    /// All versions; changes with `revision`.
    pub fn list(&self) -> Vec<AdapterLine> {
        self.ledger.list()
    }

    /// See `Ledger::revision`.
    pub fn revision(&self) -> u64 {
        self.ledger.revision()
    }

    /// Adapters on the device.
    pub fn hot(&self) -> usize {
        self.ledger.hot()
    }

    /// Device memory in use.
    pub fn report(&self) -> PagesReport {
        self.pages.report()
    }

    /// Bytes of the images in host memory.
    pub fn host_bytes(&self) -> usize {
        self.images.bytes()
    }

    /// Adapters whose files were read again since the start.
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// Whether copies or reads are under way or adapters wait to be tried, so that `poll` has work.
    pub fn is_busy(&self) -> bool {
        !self.loading.is_empty() || !self.fresh.is_empty() || self.reader.is_busy()
    }

    /// Classes and bytes of the adapters in `slots`.
    pub fn in_use(&self, slots: &BTreeSet<Slot>) -> AdaptersInUse {
        let mut sum = AdaptersInUse::default();
        for (key, there) in &self.on_device {
            if matches!(self.ledger.place(key), Some(Place::Hot(slot)) if slots.contains(&slot)) {
                sum.classes.extend(&there.classes);
                sum.bytes += there.bytes();
            }
        }
        sum
    }

    /// One turn: makes adapters whose copies have passed visible, frees those nobody has any more, and
    /// starts to bring what is wanted. Never waits for the device or for files.
    ///
    /// # Errors
    /// The device's.
    pub fn poll(
        &mut self,
        compute: &mut B::Stream,
        demand: Demand<'_>,
    ) -> Result<Polled, PoolError> {
        self.recycle_row_buffers()?;
        self.finish_copies(compute)?;
        let unreadable = self.finish_reads()?;
        let over = self.free_what_is_over(demand.completed);
        for (index, key) in demand.wanted.iter().enumerate() {
            match self.ledger.place(key) {
                // Who waited for one that could not be read is about to be refused: another read for them
                // could fail behind a mended file, and refuse those who come then.
                Some(Place::Cold) if unreadable.iter().any(|(failed, _)| failed == key) => {}
                Some(Place::Cold) => {
                    if let Some(origin) = self.images.begin_reading(key) {
                        self.reader.read(key, &origin);
                    }
                }
                Some(Place::Staged) => {
                    // What earlier requests wait for is not evicted for later ones.
                    let spared = &demand.wanted[..index];
                    self.images.touch(key);
                    self.bring(key, &Evict::Idle { spared, completed: demand.completed })?;
                }
                Some(Place::Loading(_) | Place::Hot(_)) | None => {}
            }
        }
        while let Some(key) = self.fresh.pop_front() {
            if self.ledger.place(&key) == Some(Place::Staged) {
                self.bring(&key, &Evict::Nothing)?;
            }
        }
        self.keep_to_budget(demand.wanted)?;
        Ok(Polled { over, unreadable })
    }

    fn recycle_row_buffers(&mut self) -> hal::Result<()> {
        while let Some(front) = self.rows_in_flight.front()
            && front.is_done()?
            && let Some(front) = self.rows_in_flight.pop_front()
        {
            self.row_buffers.push(front.finish()?);
        }
        Ok(())
    }

    fn finish_copies(&mut self, compute: &mut B::Stream) -> Result<(), PoolError> {
        while let Some(front) = self.loading.front() {
            for copy in &front.copies {
                if !copy.is_done()? {
                    return Ok(());
                }
            }
            let Some(Loading { key, copies }) = self.loading.pop_front() else { break };
            let pages =
                copies.into_iter().map(InFlight::finish).collect::<hal::Result<Vec<_>>>()?;
            if let Some(image) = self.images.get_mut(&key) {
                image.pages = pages;
            }
            self.write_rows(&key, compute)?;
            self.ledger.finish_load(&key)?;
        }
        Ok(())
    }

    /// Puts the slot's rows on the compute stream.
    fn write_rows(&mut self, key: &AdapterKey, compute: &mut B::Stream) -> hal::Result<()> {
        let (Some(image), Some(there), Some(Place::Loading(slot))) =
            (self.images.get(key), self.on_device.get(key), self.ledger.place(key))
        else {
            return Err(Error::invalid("adapter pool", format!("{key} is not loading")));
        };
        let mut rows = vec![LoraRow::default(); self.table.layout().rows()];
        let unit = |block: usize| there.blocks.get(block).map(|b| (b.offset / ARENA_UNIT) as u32);
        for row in &image.rows {
            let (Some(to), Some(a), Some(b)) = (rows.get_mut(row.row), unit(row.a), unit(row.b))
            else {
                return Err(Error::invalid("adapter image", format!("{key}: {row:?}")));
            };
            *to = LoraRow { a, b, class: row.class.get() as u32, scale: row.scale };
        }
        let host = match self.row_buffers.pop() {
            Some(host) => host,
            None => self.device.reserve_host(LoraTable::<B>::row_bytes(self.table.layout(), 1))?,
        };
        self.rows_in_flight.push_back(self.table.write_slot(
            &self.device,
            compute,
            host,
            slot,
            &rows,
        )?);
        Ok(())
    }

    fn free_what_is_over(&mut self, completed: Step) -> Vec<AdapterKey> {
        let over = self.ledger.sweep(completed);
        for key in &over {
            self.images.remove(key);
            if let Some(there) = self.on_device.remove(key) {
                self.pages.give_back(&there.blocks);
            }
        }
        over
    }

    /// Starts to bring a staged adapter, if there is room or room can be made.
    fn bring(&mut self, key: &AdapterKey, evict: &Evict<'_>) -> Result<(), PoolError> {
        let Some(image) = self.images.get(key) else { return Ok(()) };
        let bytes = block_bytes(image);
        let blocks = loop {
            let full = !self.ledger.has_free_slot();
            match (full, if full { Ok(Vec::new()) } else { self.pages.take(&bytes) }) {
                (false, Ok(blocks)) => break blocks,
                _ if self.evict_one(evict)? => {}
                _ => return Ok(()),
            }
        };
        self.ledger.begin_load(key)?;
        self.copy(key, blocks)?;
        Ok(())
    }

    /// Evicts the least recently used adapter that may go; whether there was one.
    fn evict_one(&mut self, evict: &Evict<'_>) -> Result<bool, PoolError> {
        let Evict::Idle { spared, completed } = evict else { return Ok(false) };
        let Some(victim) = self.ledger.evictable(*completed, spared) else { return Ok(false) };
        self.ledger.evict(&victim, *completed)?;
        if self.images.get(&victim).is_none() {
            self.ledger.cool(&victim)?;
        }
        if let Some(there) = self.on_device.remove(&victim) {
            self.pages.give_back(&there.blocks);
        }
        Ok(true)
    }

    /// Puts the copies of an image on the copy stream, one for each of its pages.
    fn copy(&mut self, key: &AdapterKey, blocks: Vec<Block>) -> hal::Result<()> {
        let Some(image) = self.images.get_mut(key) else { return Ok(()) };
        let mut copies = Vec::with_capacity(image.pages.len());
        for (index, page) in std::mem::take(&mut image.pages).into_iter().enumerate() {
            let spans: Vec<Span> = image
                .blocks
                .iter()
                .zip(&blocks)
                .filter(|(from, _)| from.page == index)
                .map(|(from, to)| Span { from: from.offset, to: to.offset, len: from.bytes })
                .collect();
            let stream = &mut self.copy_stream;
            copies.push(self.table.upload_blocks(&self.device, stream, page, &spans)?);
        }
        let classes = image.rows.iter().map(|row| row.class).collect();
        self.on_device.insert(key.clone(), OnDevice { blocks, classes });
        self.loading.push_back(Loading { key: key.clone(), copies });
        Ok(())
    }
}

/// What may be put out of the device for an adapter that comes.
enum Evict<'a> {
    Nothing,
    Idle { spared: &'a [AdapterKey], completed: Step },
}

fn block_bytes<B: Backend>(image: &AdapterImage<B>) -> Vec<usize> {
    image.blocks.iter().map(|block| block.bytes).collect()
}
