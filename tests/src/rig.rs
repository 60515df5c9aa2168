//! The memory of one case: every tensor inside one buffer, guard bytes around each.
//!
//! The rig knows what each byte was before the run. Afterwards whatever does not belong to a tensor
//! that the operator may write must still be that.

use std::ops::Range;
use std::rc::Rc;

use amphora_hal::ops::{Routing, RoutingShape};
use amphora_hal::{
    ALIGN, Backend, Carver, DType, HostBytes, LoraRow, LoraTable, OpBounds, PlanArea, PlanLimits,
    PlanView, Pool, Result, Slot, Span, StreamRole, Tensor, TokenTable, Weight,
};

use crate::fixtures::{Adapters, HostMatrices};
use crate::host::{HostTensor, POISON};
use crate::packed::PackedAdapters;
use crate::step::Step;

/// Guard bytes in front of each tensor, and behind the last.
const GUARD: usize = 2 * ALIGN;

/// A named stretch of the buffer.
#[derive(Debug, Clone)]
pub struct Item {
    /// As the case calls it.
    pub name: String,
    /// Bytes of the buffer.
    pub range: Range<usize>,
    /// Extents.
    pub dims: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Whether the host knows its bytes; packed weights, blocks and plans are made elsewhere.
    host_made: bool,
}

impl Item {
    /// Its part of a snapshot of the buffer.
    pub fn of(&self, snapshot: &[u8]) -> HostTensor {
        HostTensor::from_bytes(&self.dims, self.dtype, &snapshot[self.range.clone()])
    }
}

/// One buffer, one stream, and what lies where.
pub struct Rig<B: Backend> {
    device: B,
    stream: B::Stream,
    carver: Carver<B>,
    whole: Tensor<B>,
    staging: Option<B::Host>,
    image: Vec<u8>,
    items: Vec<Item>,
    /// Where plans go, as what they are and as bytes.
    plan: Option<(PlanArea<B>, Tensor<B>)>,
    tables: Vec<Rc<LoraTable<B>>>,
}

impl<B: Backend> Rig<B> {
    /// A buffer of `bytes`, poisoned, and a stream with the workspace that `bounds` need.
    ///
    /// # Errors
    /// The device's.
    pub fn new(device: &B, bytes: usize, bounds: &[OpBounds]) -> Result<Self> {
        let workspace = bounds.iter().map(|b| device.workspace(b)).max().unwrap_or(0);
        let buffer = device.reserve(Pool::Scratch, bytes)?;
        let mut carver = Carver::new(buffer);
        let front: Tensor<B> = carver.carve(&[GUARD], DType::U8)?;
        let mut rig = Rig {
            stream: device.stream(StreamRole::Compute, workspace)?,
            whole: Tensor::new(front.buffer().clone(), 0, &[bytes], DType::U8)?,
            staging: Some(device.reserve_host(bytes)?),
            image: POISON.repeat(bytes.div_ceil(POISON.len()))[..bytes].to_vec(),
            device: device.clone(),
            carver,
            items: Vec::new(),
            plan: None,
            tables: Vec::new(),
        };
        rig.upload(&[Span::front(bytes)])?;
        Ok(rig)
    }

    /// The device.
    pub fn device(&self) -> &B {
        &self.device
    }

    /// The stream of the case.
    pub fn stream(&mut self) -> &mut B::Stream {
        &mut self.stream
    }

    /// What lies where.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    fn staging(&mut self) -> Result<B::Host> {
        match self.staging.take() {
            Some(host) => Ok(host),
            None => self.device.reserve_host(self.image.len()),
        }
    }

    fn upload(&mut self, spans: &[Span]) -> Result<()> {
        let mut host = self.staging()?;
        for span in spans {
            let bytes = span.from..span.from + span.len;
            host.bytes_mut()[bytes.clone()].copy_from_slice(&self.image[bytes]);
        }
        let sent = self.device.upload(&mut self.stream, host, spans, &mut self.whole)?;
        self.staging = Some(sent.finish()?);
        Ok(())
    }

    fn note(&mut self, name: &str, tensor: &Tensor<B>, host_made: bool) {
        let range = tensor.offset()..tensor.offset() + tensor.bytes();
        self.items.push(Item {
            name: name.to_owned(),
            range,
            dims: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            host_made,
        });
    }

    fn carve(
        &mut self,
        name: &str,
        dims: &[usize],
        dtype: DType,
        host_made: bool,
    ) -> Result<Tensor<B>> {
        let tensor = self.carver.carve(dims, dtype)?;
        self.carver.carve(&[GUARD], DType::U8)?;
        self.note(name, &tensor, host_made);
        Ok(tensor)
    }

    /// A tensor that holds `content` before every run.
    ///
    /// # Errors
    /// The case is larger than it said.
    pub fn tensor(&mut self, name: &str, content: &HostTensor) -> Result<Tensor<B>> {
        let tensor = self.carve(name, &content.dims, content.dtype, true)?;
        let at = tensor.offset();
        self.image[at..at + content.bytes.len()].copy_from_slice(&content.bytes);
        Ok(tensor)
    }

    /// A tensor that is poisoned before every run.
    ///
    /// # Errors
    /// As [`Rig::tensor`].
    pub fn poisoned(&mut self, name: &str, dims: &[usize], dtype: DType) -> Result<Tensor<B>> {
        self.tensor(name, &HostTensor::poison(dims, dtype))
    }

    /// Packs a weight.
    ///
    /// # Errors
    /// The backend's.
    pub fn weight(&mut self, name: &str, weight: &HostMatrices) -> Result<Weight<B>> {
        let bytes = self.device.packed_bytes(&weight.meta())?;
        let into = self.carve(name, &[bytes], DType::U8, false)?;
        let (device, stream) = (self.device.clone(), &mut self.stream);
        weight.with_host_weight(|host| device.pack(stream, host, into))
    }

    /// Routing memory; its parts are items `routing.experts` and so on.
    ///
    /// # Errors
    /// As [`Rig::tensor`].
    pub fn routing(&mut self, shape: RoutingShape) -> Result<Routing<B>> {
        let routing = Routing::carve(&mut self.carver, shape)?;
        self.carver.carve(&[GUARD], DType::U8)?;
        for (name, tensor) in [
            ("routing.experts", routing.experts().tensor()),
            ("routing.weights", routing.weights()),
            ("routing.perm", routing.perm().tensor()),
            ("routing.tiles", routing.tiles().tensor()),
            ("routing.lora_tiles", routing.lora_tiles().tensor()),
        ] {
            self.note(name, tensor, true);
        }
        Ok(routing)
    }

    /// The token table, item `table`.
    ///
    /// # Errors
    /// As [`Rig::tensor`].
    pub fn token_table(&mut self, tokens: &[i32], limits: &PlanLimits) -> Result<TokenTable<B>> {
        let tensor = self.tensor("table", &HostTensor::ints(&[tokens.len()], tokens))?;
        TokenTable::new(tensor, limits)
    }

    /// A table with these adapters: blocks packed and copied, rows written.
    ///
    /// # Errors
    /// The backend's.
    pub fn lora(&mut self, adapters: &Adapters) -> Result<Rc<LoraTable<B>>> {
        let (layout, _) = adapters.layout();
        let packed = PackedAdapters::new(&self.device, adapters)?;
        let arena = self.carve("arena", &[packed.blocks.len()], DType::U8, false)?;
        let words = LoraTable::<B>::row_bytes(&layout, adapters.slots) / 4;
        let zeros = HostTensor::ints(&[words], &vec![0; words]);
        let rows = self.tensor("rows", &zeros)?;
        // The table's contract: rows are zero until a slot is written.
        self.upload(&[span(rows.offset()..rows.offset() + words * 4)])?;
        let item = self.items.last_mut().expect("rows were just noted");
        item.host_made = false;
        let table = LoraTable::new(arena, rows, layout.clone(), adapters.slots, adapters.dtype)?;
        self.write_blocks(&table, &packed.blocks)?;
        for slot in 0..adapters.slots {
            self.write_slot(&table, slot, &packed.slot_rows(adapters, slot))?;
        }
        let table = Rc::new(table);
        self.tables.push(table.clone());
        Ok(table)
    }

    /// The tables that [`Rig::lora`] made.
    pub fn tables(&self) -> &[Rc<LoraTable<B>>] {
        &self.tables
    }

    /// Writes the front of the arena.
    ///
    /// # Errors
    /// The backend's.
    pub fn write_blocks(&mut self, table: &LoraTable<B>, blocks: &[u8]) -> Result<()> {
        let mut host = self.device.reserve_host(blocks.len())?;
        host.bytes_mut()[..blocks.len()].copy_from_slice(blocks);
        let spans = [Span::front(blocks.len())];
        let sent = table.upload_blocks(&self.device, &mut self.stream, host, &spans)?;
        sent.finish()?;
        Ok(())
    }

    /// Writes one slot's rows.
    ///
    /// # Errors
    /// The backend's.
    pub fn write_slot(
        &mut self,
        table: &LoraTable<B>,
        slot: usize,
        rows: &[LoraRow],
    ) -> Result<()> {
        let host = self.device.reserve_host(size_of_val(rows))?;
        let slot = Slot::new(slot as u16);
        let sent = table.write_slot(&self.device, &mut self.stream, host, slot, rows)?;
        sent.finish()?;
        Ok(())
    }

    /// Every tensor that the host made is again what it was; then checks that making the others
    /// wrote nothing else.
    ///
    /// # Errors
    /// The device's.
    pub fn reset(&mut self) -> Result<()> {
        let made = self.items.iter().filter(|item| item.host_made && !item.range.is_empty());
        let spans: Vec<Span> = made.map(|item| span(item.range.clone())).collect();
        self.upload(&spans)
    }

    /// Uploads a plan, always to the same addresses.
    ///
    /// # Errors
    /// hal's or the device's.
    pub fn plan(&mut self, step: &Step) -> Result<PlanView<B>> {
        let bytes = step.plan_bytes()?;
        if self.plan.is_none() {
            let area = self.carve("plan", &[bytes], DType::U8, false)?;
            self.plan = Some((PlanArea::new(area.clone())?, area));
        }
        let (area, whole) = self.plan.as_mut().expect("made above");
        // A plan writes the bytes it uses, so what an earlier one left behind them is cleared: the
        // memory after a run must not depend on the plans before it.
        let mut host = self.device.reserve_host(bytes)?;
        host.bytes_mut().fill(0);
        let cleared = self.device.upload(&mut self.stream, host, &[Span::front(bytes)], whole)?;
        let host = cleared.finish()?;
        let (view, sent) = step.builder()?.upload(&self.device, &mut self.stream, host, area)?;
        sent.finish()?;
        Ok(view)
    }

    /// All bytes of the buffer.
    ///
    /// # Errors
    /// The device's: here late faults surface.
    pub fn snapshot(&mut self) -> Result<Vec<u8>> {
        let host = self.staging()?;
        let sent = self.device.download(&mut self.stream, &self.whole, host)?;
        let host = sent.finish()?;
        let bytes = host.bytes()[..self.image.len()].to_vec();
        self.staging = Some(host);
        Ok(bytes)
    }

    /// The first byte of `after` outside `writable` that is not as in `before`, in words.
    pub fn stray_write(
        &self,
        before: &[u8],
        after: &[u8],
        writable: &[Range<usize>],
    ) -> Option<String> {
        let mut writable = writable.to_vec();
        writable.sort_by_key(|range| range.start);
        writable.push(after.len()..after.len());
        let mut from = 0;
        for range in writable {
            let kept = from..range.start.max(from);
            if before[kept.clone()] != after[kept.clone()] {
                let at = kept.into_iter().find(|&at| before[at] != after[at])?;
                return Some(self.describe(at));
            }
            from = range.end.max(from);
        }
        None
    }

    /// Bytes that neither the host put there nor a packing owns, but that changed while the case
    /// was set up.
    pub fn stray_setup(&self, before_run: &[u8]) -> Option<String> {
        let made: Vec<Range<usize>> =
            self.items.iter().filter(|i| !i.host_made).map(|i| i.range.clone()).collect();
        self.stray_write(&self.image, before_run, &made)
    }

    fn describe(&self, at: usize) -> String {
        let inside = self.items.iter().find(|item| item.range.contains(&at));
        if let Some(item) = inside {
            return format!("input {} changed at byte {}", item.name, at - item.range.start);
        }
        let before =
            self.items.iter().filter(|item| item.range.end <= at).max_by_key(|i| i.range.end);
        match before {
            Some(item) => {
                format!("guard changed, {} bytes behind {}", at - item.range.end, item.name)
            }
            None => format!("guard changed in front of everything, at byte {at}"),
        }
    }
}

/// Copies `bytes` to the front of a tensor, and waits.
///
/// # Panics
/// The device fails, or they do not fit.
pub fn upload<B: Backend>(device: &B, stream: &mut B::Stream, to: &Tensor<B>, bytes: &[u8]) {
    let mut host = device.reserve_host(bytes.len()).expect("pinned");
    host.bytes_mut().copy_from_slice(bytes);
    device
        .upload(stream, host, &[Span::front(bytes.len())], &mut to.clone())
        .map_err(|returned| returned.error)
        .and_then(|sent| sent.finish())
        .expect("uploaded");
}

fn span(range: Range<usize>) -> Span {
    Span { from: range.start, to: range.start, len: range.len() }
}
