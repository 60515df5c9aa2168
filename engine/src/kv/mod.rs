//! Blocks of the paged KV cache: who references which, which are free, and which are kept for what they
//! hold.
//!
//! Nothing is promised: a sequence gets blocks for the tokens it has when it is admitted, and further ones
//! as it grows; when there are none, the scheduler takes a later sequence's. Every block has a count of
//! references: sequences that begin alike, and the answers to one prompt, share blocks. A shared block is
//! never written at a position that another of its sequences can read: a fork copies the last, partly filled
//! one before it writes.
//!
//! A block may be given to another sequence while a step that uses it is in flight: steps run one after
//! the other on one stream, so whatever is planned later comes later.

mod prefix;
#[cfg(test)]
mod tests;

use amphora_hal::BlockCopy;
pub use prefix::Generation;
use prefix::{Content, Link, PrefixCache};

/// Whether full blocks are kept for sequences that begin alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefixCaching {
    /// They are, while nothing else needs them.
    #[default]
    On,
    /// Every prompt is computed.
    Off,
}

/// The blocks of one sequence in order of position.
///
/// Must go back through [`KvBlocks::release`].
#[derive(Debug, Default)]
#[must_use]
pub struct BlockTable {
    blocks: Vec<u32>,
    /// Full blocks whose contents the prefix cache knows, and the last of them.
    known: usize,
    link: Option<Link>,
}

impl BlockTable {
    /// Ids of the blocks held, in order of position; an id names a block in the cache of every layer.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

/// A block that is to be copied before a sequence that shares it writes; keeps it referenced.
///
/// Must go back through [`KvBlocks::copied`].
#[derive(Debug)]
#[must_use]
pub struct PendingCopy {
    from: u32,
    to: u32,
}

impl PendingCopy {
    /// The block read and the one written, for the plan.
    pub fn blocks(&self) -> BlockCopy {
        BlockCopy { from: self.from, to: self.to }
    }
}

/// There are not enough blocks now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

/// What a sequence needs to start.
#[derive(Debug, Clone, Copy)]
pub struct Admission<'a> {
    /// Its adapter's version.
    pub generation: Generation,
    /// The tokens it has.
    pub tokens: &'a [u32],
    /// Positions from the first that need not be computed if the cache has them; less than all.
    pub skippable: usize,
    /// Blocks that must be left for others.
    pub spare: usize,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixReport {
    /// Tokens of admitted sequences that were looked for in the cache.
    pub queried_tokens: u64,
    /// Those whose keys and values were there.
    pub hit_tokens: u64,
    /// Blocks whose contents were given up for others.
    pub evicted_blocks: u64,
}

/// The pool of blocks.
#[derive(Debug)]
pub struct KvBlocks {
    block_size: usize,
    references: Vec<u32>,
    /// Blocks without references whose contents nobody wants.
    free: Vec<u32>,
    /// `None` when it is turned off.
    cache: Option<PrefixCache>,
    report: PrefixReport,
}

impl KvBlocks {
    /// A pool of `blocks` blocks of `block_size` positions each.
    pub fn new(blocks: usize, block_size: usize, caching: PrefixCaching) -> Self {
        let ids = 0..u32::try_from(blocks).expect("block ids are 32 bit on every device");
        let cache = (caching == PrefixCaching::On).then(|| PrefixCache::new(blocks));
        KvBlocks {
            block_size,
            references: vec![0; blocks],
            free: ids.rev().collect(),
            cache,
            report: PrefixReport::default(),
        }
    }

    /// Positions in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Blocks that sequences reference.
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    /// Blocks kept for what they hold that nobody references.
    pub fn cached(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::idle)
    }

    /// Blocks that a sequence can have: free ones and those that are kept.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached()
    }

    /// Hits and evictions of the prefix cache.
    pub fn prefix_report(&self) -> PrefixReport {
        self.report
    }

    /// Blocks that `positions` take.
    pub fn blocks_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }

    /// A table for all tokens that a sequence has, and the number of positions, from the first, that are
    /// computed already; `None` when there is no room now.
    pub fn admit(&mut self, want: Admission<'_>) -> Option<(BlockTable, usize)> {
        let mut table = self.find(&want);
        let hit = table.blocks.len();
        let idle = |block: &&u32| self.cache.as_ref().is_some_and(|cache| cache.is_idle(**block));
        let revived = table.blocks.iter().filter(idle).count();
        let fresh = self.blocks_for(want.tokens.len()) - hit;
        if fresh + revived + want.spare > self.available() {
            return None;
        }
        for &block in &table.blocks {
            self.reference(block);
        }
        for _ in 0..fresh {
            let block = self.take_one().expect("counted above");
            table.blocks.push(block);
        }
        let computed = hit * self.block_size;
        if self.cache.is_some() {
            self.report.queried_tokens += want.tokens.len() as u64;
            self.report.hit_tokens += computed as u64;
        }
        Some((table, computed))
    }

    /// The longest run of known blocks that `want` begins with. References nothing yet.
    fn find(&self, want: &Admission<'_>) -> BlockTable {
        let mut table = BlockTable::default();
        let Some(cache) = &self.cache else { return table };
        for tokens in want.tokens[..want.skippable].chunks_exact(self.block_size) {
            let content = Content { generation: want.generation, before: table.link, tokens };
            let Some((block, link)) = cache.find(content) else { break };
            table.blocks.push(block);
            table.known += 1;
            table.link = Some(link);
        }
        table
    }

    /// Takes blocks until `table` covers `positions`; whether there were enough. What was taken stays.
    pub fn grow(&mut self, table: &mut BlockTable, positions: usize) -> bool {
        while table.blocks.len() < self.blocks_for(positions) {
            let Some(block) = self.take_one() else { return false };
            table.blocks.push(block);
        }
        true
    }

    /// A table of the blocks that hold the first `positions` of another: for a sequence that begins with
    /// the same tokens under the same adapter. The last of them may be partly filled; it is not written
    /// through this table until [`KvBlocks::own`] has replaced it.
    pub fn share(&mut self, table: &BlockTable, positions: usize) -> BlockTable {
        let count = self.blocks_for(positions).min(table.blocks.len());
        let blocks = table.blocks[..count].to_vec();
        blocks.iter().for_each(|&block| self.reference(block));
        BlockTable { blocks, known: 0, link: None }
    }

    /// Gives a table that shares the first `positions` blocks of its own for what follows, up to all
    /// `tokens`: whether there was room, with `spare` blocks left. The copy that the first step must make
    /// is there where the last shared block is partly filled.
    pub fn own(
        &mut self,
        table: &mut BlockTable,
        (positions, tokens): (usize, usize),
        spare: usize,
    ) -> Result<Option<PendingCopy>, NoRoom> {
        let full = positions / self.block_size;
        if self.blocks_for(tokens) - full + spare > self.available() {
            return Err(NoRoom);
        }
        let from = (full < table.blocks.len()).then(|| table.blocks.remove(full));
        let grown = self.grow(table, tokens);
        debug_assert!(grown, "counted above");
        Ok(from.map(|from| PendingCopy { from, to: table.blocks[full] }))
    }

    /// Ends the reference to the block that a copy reads. Not before the step that copies is planned as a
    /// whole, so that no other copy of that step writes it.
    pub fn copied(&mut self, copy: PendingCopy) {
        self.release(BlockTable { blocks: vec![copy.from], known: 0, link: None });
    }

    /// Notes what the blocks of `table` hold. `tokens` are those at its first positions, whose keys and
    /// values are computed.
    pub fn note(&mut self, table: &mut BlockTable, generation: Generation, tokens: &[u32]) {
        let Some(cache) = &mut self.cache else { return };
        // A step adds at most a few blocks to many that are known.
        let new = tokens.get(table.known * self.block_size..).unwrap_or_default();
        let blocks = &table.blocks[table.known..];
        for (tokens, &block) in new.chunks_exact(self.block_size).zip(blocks) {
            let content = Content { generation, before: table.link, tokens };
            table.link = Some(cache.register(block, content));
            table.known += 1;
        }
    }

    /// Ends a sequence's references.
    pub fn release(&mut self, table: BlockTable) {
        for block in table.blocks.into_iter().rev() {
            let references = &mut self.references[block as usize];
            *references -= 1;
            let over = *references == 0;
            if over && !self.cache.as_mut().is_some_and(|cache| cache.let_go(block)) {
                self.free.push(block);
            }
        }
    }

    /// Gives up everything that an adapter's version computed: nobody will ask for it again.
    pub fn forget(&mut self, generation: Generation) {
        if let Some(cache) = &mut self.cache {
            self.free.extend(cache.forget(generation));
        }
    }

    fn reference(&mut self, block: u32) {
        self.references[block as usize] += 1;
        if let Some(cache) = &mut self.cache {
            cache.hold(block);
        }
    }

    fn take_one(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let block = self.cache.as_mut()?.evict()?;
                self.report.evicted_blocks += 1;
                block
            }
        };
        self.references[block as usize] = 1;
        Some(block)
    }
}
