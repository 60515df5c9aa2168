//! The prefix cache: full blocks found again by what was computed into them.
//!
//! What a block holds follows from the tokens up to its end and from the adapter that computed them. So
//! its key is the block before it, its own tokens, and the adapter's *generation*: the version, never the
//! name, under which other weights may be loaded tomorrow. Keys are compared whole; a hash only says where
//! to look. A block before it is named by a number that is given once and never again: one that is evicted
//! takes what followed it out of reach, and no later block can be taken for it.
//!
//! A cached block that no sequence references is as good as a free one: it is used again, the least
//! recently released first, when there is no other. Sequences release their last block first, so ends of
//! prefixes go before beginnings.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::adapters::ledger::Pin;

/// What besides tokens decides the contents of the cache: the version of the adapter, `None` for the base
/// model. Versions count up over all names and are never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub Option<u64>);

impl Generation {
    /// That of whoever has this pin.
    pub fn of(pin: Option<&Pin>) -> Self {
        Generation(pin.map(|pin| pin.key.version))
    }
}

/// The number of one registration of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Link(u64);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    generation: Generation,
    /// The block before; `None` at position 0.
    before: Option<Link>,
    tokens: Box<[u32]>,
}

/// A full block, as it is looked for or registered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Content<'a> {
    pub generation: Generation,
    pub before: Option<Link>,
    pub tokens: &'a [u32],
}

impl Content<'_> {
    fn key(&self) -> Key {
        let Content { generation, before, tokens } = *self;
        Key { generation, before, tokens: tokens.into() }
    }
}

#[derive(Debug)]
struct Registered {
    key: Arc<Key>,
    link: Link,
    /// When its last reference went, if it has none: its place in `idle`.
    idle_since: Option<u64>,
}

/// Which blocks hold what.
#[derive(Debug)]
pub(super) struct PrefixCache {
    index: HashMap<Arc<Key>, u32>,
    /// By block.
    registered: Vec<Option<Registered>>,
    /// Registered blocks without references, the least recently released first.
    idle: BTreeMap<u64, u32>,
    /// Counts up with every registration and release.
    clock: u64,
}

impl PrefixCache {
    pub fn new(blocks: usize) -> Self {
        PrefixCache {
            index: HashMap::new(),
            registered: (0..blocks).map(|_| None).collect(),
            idle: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Registered blocks without references.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Whether `block` is registered and has no reference.
    pub fn is_idle(&self, block: u32) -> bool {
        self.entry(block).is_some_and(|entry| entry.idle_since.is_some())
    }

    /// The block that holds `content`.
    pub fn find(&self, content: Content<'_>) -> Option<(u32, Link)> {
        let block = *self.index.get(&content.key())?;
        self.entry(block).map(|entry| (block, entry.link))
    }

    /// Notes that `block`, which has a reference, holds `content`. Gives the link to go on from: another
    /// block's if one with this content is known already.
    pub fn register(&mut self, block: u32, content: Content<'_>) -> Link {
        if let Some(entry) = self.entry(block) {
            return entry.link;
        }
        if let Some((_, link)) = self.find(content) {
            return link;
        }
        let (key, link) = (Arc::new(content.key()), Link(self.tick()));
        self.index.insert(key.clone(), block);
        self.registered[block as usize] = Some(Registered { key, link, idle_since: None });
        link
    }

    /// Notes that `block` has a reference.
    pub fn hold(&mut self, block: u32) {
        if let Some(entry) = &mut self.registered[block as usize]
            && let Some(since) = entry.idle_since.take()
        {
            self.idle.remove(&since);
        }
    }

    /// Notes that the last reference of `block` went; whether it stays for its content.
    pub fn let_go(&mut self, block: u32) -> bool {
        let now = self.tick();
        let Some(entry) = &mut self.registered[block as usize] else { return false };
        entry.idle_since = Some(now);
        self.idle.insert(now, block);
        true
    }

    /// Gives up the block that was let go first.
    pub fn evict(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        if let Some(entry) = self.registered[block as usize].take() {
            self.index.remove(&entry.key);
        }
        Some(block)
    }

    /// Forgets everything of a generation; gives the blocks that are free by that.
    pub fn forget(&mut self, generation: Generation) -> Vec<u32> {
        let mut freed = Vec::new();
        for (block, slot) in self.registered.iter_mut().enumerate() {
            if slot.as_ref().is_some_and(|entry| entry.key.generation == generation)
                && let Some(entry) = slot.take()
            {
                self.index.remove(&entry.key);
                if let Some(since) = entry.idle_since {
                    freed.extend(self.idle.remove(&since));
                    debug_assert_eq!(freed.last(), Some(&(block as u32)));
                }
            }
        }
        freed
    }

    fn entry(&self, block: u32) -> Option<&Registered> {
        self.registered[block as usize].as_ref()
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
