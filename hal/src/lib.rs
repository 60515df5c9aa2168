//! The contract between models and devices.
//!
//! A [`Backend`] is memory, order and operators: [`Device`] reserves bytes, moves them and keeps
//! streams, events and graphs; [`TensorOps`] and [`LoraOps`] run a transformer's operators on them;
//! [`Backend::pack`] brings weights into a device's own layout. Models, scheduler and server are
//! written once against this crate, and one conformance suite holds every backend to it.
//!
//! # What a backend promises
//!
//! * **Order.** A stream runs what is put on it in program order. Two streams meet only through an
//!   event. No operator waits on the host, allocates, or reads a device value back.
//! * **Counted memory.** Everything is reserved before [`Device::seal`]; an operator's scratch is its
//!   stream's workspace, counted by [`Device::workspace`]. Reserved bytes are zeroed.
//! * **Numerics.** Products accumulate in f32. The rank-r intermediate of a delta stays f32. Base and
//!   delta meet in f32 and are rounded once. A token's expert outputs add in the order of its
//!   experts. The order of a sum may depend on the bucket, never on which adapters are present.
//! * **The law of the base row.** A row without an adapter has the same bits from [`ops::LoraLinear`]
//!   as from [`ops::Linear`], and from [`ops::FusedMoeLora`] as from [`ops::FusedMoe`].
//! * **Faults are errors.** A fault of the device surfaces as [`Error::Lost`], never as undefined
//!   behaviour of the host.
//!
//! # What the caller owes
//!
//! * Operators are structs whose `check` validates shapes, types and overlap once, for every backend;
//!   a [`Checked`] value can be made by this crate alone, and a backend relies on it.
//! * Integers that address memory reach a device only as an [`Index`]: made by [`PlanBuilder`], which
//!   holds each against its bound; by [`LoraTable`]; or by an operator, in range by construction.
//!   Kernels do no range checks.
//! * Memory that becomes a [`PlanArea`], a [`TokenTable`], a [`LoraTable`] or a packed [`Weight`] is given
//!   up: no other handle to it is kept and written, and a [`PlanView`] or routing is used with the step
//!   that made it. A tensor is a handle, so this rule is kept by the caller; whoever breaks it reads
//!   foreign values, which a kernel does not check.
//! * Host buffers of a transfer move into it and come back ([`InFlight`]).
//! * Pools outlive the streams and graphs that use them.
//!
//! # Why dispatch is static
//!
//! A trait object would force buffers, streams, events and graphs through downcasts, turning type
//! errors into panics. A process serves on one kind of device, so generic code says `B: Backend` and
//! one `match` in the server names types. Only what touches device memory is generic.
//!
//! # What is absent
//!
//! `unsafe`, threads, `cfg(feature)`, broadcasting, autograd, and any knowledge of requests or of
//! adapters' names.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod backend;
mod caps;
mod checked;
mod counters;
mod ctx;
mod device;
mod dtype;
mod error;
mod lora;
pub mod ops;
mod plan;
mod profile;
mod segments;
mod shape;
mod tensor;
mod transfer;
mod weight;

pub use backend::{Backend, LoraOps, TensorOps};
pub use caps::{Caps, OpBounds, OpKey, OpKind, Support};
pub use checked::Checked;
pub use counters::Counters;
pub use ctx::Ctx;
pub use device::{Device, DeviceBytes, DeviceConfig, HostBytes, MemoryReport, Pool, StreamRole};
pub use dtype::{DType, Element, Float};
pub use error::{Error, Result};
pub use lora::{
    ARENA_UNIT, Factor, HostFactor, LoraLayout, LoraRow, LoraShape, LoraSlice, LoraTable,
    RankClass, SliceId, SliceMeta, Slot,
};
pub use plan::{
    BlockCopy, Bucket, EDIT_WORDS, HostPlan, LogitEdit, LogitRows, MOST_BEST, PlanArea,
    PlanBuilder, PlanLayout, PlanLimits, PlanSent, PlanView, SAMPLE_WORDS, SampleParams, SampleRow,
    SequenceMeta, SequencePlan, TokenTable, Tokens,
};
pub use profile::{Detail, Mark, Part, Profile};
pub use segments::{SegmentTable, Segments, Tile};
pub use shape::{Extent, MAX_DIMS, Shape};
pub use tensor::{ALIGN, Carver, Index, Tensor, carved_bytes};
pub use transfer::{InFlight, Returned, Sent, Span};
pub use weight::{HostData, HostPart, HostWeight, HostWeightMeta, Scheme, Weight, narrow, widen};
