//! The host twin: CANN's C ABI over host memory, for machines without an NPU.
//!
//! It exports the runtime symbols, two-phase operators and kernel launches that `backend-ascend`
//! calls, under the vendor's names, so the same code runs on it that would run on a device. What it
//! lets pass is all that we know, so it is strict: it refuses what the vendor's documents say is
//! refused, and whatever it does not model, by the vendor's codes and with the rule in
//! `aclGetRecentErrMsg`.
//!
//! Work put on a stream waits there until something asks for it: a synchronisation, a query, a wait
//! of another stream. So a missing wait shows as stale bytes and never passes by luck, and a fault of
//! a kernel surfaces where the vendor's would: at the next synchronisation.
//!
//! * `acl`: devices, contexts, streams, events, memory, capture, kernels by handle.
//! * `aclnn`: operators; phase one checks, phase two computes from the vendor's own arguments.
//! * `kernel_operator/`: the header that kernel sources compile against here.
//!
//! It proves indexing, tiling, tails, order of roundings, API use and bytes moved. It proves nothing
//! about speed, timing races, or faults of the vendor's own.

pub mod acl;
pub mod aclnn;
