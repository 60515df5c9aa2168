//! An in-order queue: copies, launches, events.

use std::ffi::c_void;
use std::sync::Arc;

use amphora_hal::Result;
use cudarc::driver::sys::{self, CUstream};

use super::{Clock, Context, DeviceMemory, Event, Function, PinnedMemory, check};

/// When a kernel may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// When all in front of it has passed.
    Behind,
    /// While the kernel in front of it ends (programmatic dependent launch). The kernel executes
    /// `griddepcontrol.wait` before it reads or writes what a kernel in front of it may touch; a
    /// device of an architecture without the instruction begins it behind.
    Overlapped,
}

/// The form of a launch: its blocks, how they are grouped, and when they may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) grid: [u32; 3],
    /// Threads of a block; the launch puts the kernel's own number here.
    pub(crate) threads: u32,
    /// Bytes of shared memory beside what the kernel declares, up to what a block may have at most.
    pub(crate) shared: u32,
    /// Blocks along x that run together and see each other's shared memory; 1: none.
    pub(crate) cluster: u32,
    pub(crate) begin: Begin,
}

impl Geometry {
    /// Single blocks, behind all in front of them, with no shared memory of their own.
    pub(crate) fn new(grid: [u32; 3]) -> Self {
        Geometry { grid, threads: 0, shared: 0, cluster: 1, begin: Begin::Behind }
    }

    /// The same with `bytes` of shared memory.
    pub(crate) fn shared(self, bytes: u32) -> Self {
        Geometry { shared: bytes, ..self }
    }

    /// The same, beginning while the kernel in front ends; see [`Begin::Overlapped`].
    pub(crate) fn overlapped(self) -> Self {
        Geometry { begin: Begin::Overlapped, ..self }
    }

    /// What it asks for that no launch gets: more than `shared` bytes of shared memory, or more blocks than
    /// the driver takes along an axis of a grid (2³¹ − 1 along the first, 65535 along the others).
    pub(crate) fn excess(&self, shared: usize) -> Option<String> {
        const MOST: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
        if self.shared as usize > shared {
            return Some(format!("{} of {shared} bytes of shared memory", self.shared));
        }
        let axis = (0..3).find(|&axis| self.grid[axis] > MOST[axis])?;
        Some(format!("{} of {} blocks along axis {axis}", self.grid[axis], MOST[axis]))
    }
}

/// Does not order against the null stream.
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: CUstream,
}

// SAFETY: a stream handle may be used from any thread; `&mut` keeps one writer at a time.
unsafe impl Send for Stream {}

/// Bytes of device memory: `[at, at + len)` of an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    memory: &'a DeviceMemory,
    at: usize,
    len: usize,
}

impl<'a> Part<'a> {
    /// # Panics
    /// The part leaves the allocation: a bug of the caller, who has checked spans by then.
    pub(crate) fn new(memory: &'a DeviceMemory, at: usize, len: usize) -> Self {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= memory.len()),
            "part of an allocation"
        );
        Part { memory, at, len }
    }

    fn address(self) -> u64 {
        self.memory.address() + self.at as u64
    }
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { context: context.clone(), raw })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Enqueues a copy from `host`, from byte `from` on. `host` must stay until the copy has passed,
    /// which the caller sees to with an event behind it.
    ///
    /// # Panics
    /// The copy leaves `host`: a bug of the caller, who has checked spans by then.
    pub(crate) fn upload(&mut self, host: &PinnedMemory, from: usize, to: Part<'_>) -> Result<()> {
        self.context.bind()?;
        let bytes = &host.bytes()[from..from + to.len];
        // SAFETY: both sides are checked; `host` moves into an `InFlight` that outlives the copy or
        // leaks, or is half of a staging that waits for the stream or leaks; and dropping the allocation
        // waits for the device.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address(), bytes.as_ptr().cast(), bytes.len(), self.raw)
        })
    }

    /// Copies pageable bytes and waits until they are on the device.
    pub(crate) fn upload_now(&mut self, bytes: &[u8], to: Part<'_>) -> Result<()> {
        assert_eq!(bytes.len(), to.len, "one length for both sides");
        self.context.bind()?;
        // SAFETY: both sides are checked, and the copy has passed before `bytes` is given back, or
        // the stream is unusable.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address(), bytes.as_ptr().cast(), bytes.len(), self.raw)
        })?;
        self.synchronize()
    }

    /// Enqueues a copy to the front of `host`; as for `upload`.
    pub(crate) fn download(&mut self, from: Part<'_>, host: &mut PinnedMemory) -> Result<()> {
        self.context.bind()?;
        let bytes = &mut host.bytes_mut()[..from.len];
        // SAFETY: as for `upload`.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                bytes.as_mut_ptr().cast(),
                from.address(),
                bytes.len(),
                self.raw,
            )
        })
    }

    /// An event behind everything so far.
    pub(crate) fn record(&mut self) -> Result<Event> {
        let event = Event::new(&self.context)?;
        // SAFETY: both live, in one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw(), self.raw) })?;
        Ok(event)
    }

    /// A point behind everything so far that tells when it was passed.
    pub(crate) fn clock(&mut self) -> Result<Clock> {
        self.clock_by(sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT)
    }

    /// The same within a capture: each launch of the graph passes it anew.
    pub(crate) fn clock_node(&mut self) -> Result<Clock> {
        self.clock_by(sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL)
    }

    fn clock_by(&mut self, flags: sys::CUevent_record_flags) -> Result<Clock> {
        let clock = Clock::new(&self.context)?;
        // SAFETY: both live, in one context.
        check("cuEventRecordWithFlags", unsafe {
            sys::cuEventRecordWithFlags(clock.raw(), self.raw, flags as u32)
        })?;
        Ok(clock)
    }

    /// Makes what follows wait for `event`, on the device.
    pub(crate) fn wait(&mut self, event: &Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both live, in one context; no flags are defined.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw(), 0) })
    }

    /// Waits on the host for everything so far.
    pub(crate) fn synchronize(&mut self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Enqueues a kernel with one argument.
    ///
    /// # Safety
    /// The kernel's only parameter has the layout of `A`, and every address in `args` is valid for
    /// what the kernel does with it until the work has passed.
    pub(crate) unsafe fn launch<A: Copy>(
        &mut self,
        function: &Function,
        geometry: Geometry,
        args: &A,
    ) -> Result<()> {
        self.context.bind()?;
        let (mut attributes, count) = attributes(&self.context, geometry);
        let config = self.config(geometry, &mut attributes[..count]);
        let mut params: [*mut c_void; 1] = [std::ptr::from_ref(args).cast_mut().cast()];
        // SAFETY: function and stream live; `config` names `count` initialised attributes; the driver
        // copies the parameter before it returns; the caller vouches for its layout and addresses.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function.raw(),
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }

    fn config(
        &self,
        geometry: Geometry,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: geometry.grid[0],
            gridDimY: geometry.grid[1],
            gridDimZ: geometry.grid[2],
            blockDimX: geometry.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: geometry.shared,
            hStream: self.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    /// Whether all clusters of such a launch run at once on a device that runs nothing else.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub(crate) fn runs_at_once(&self, function: &Function, geometry: Geometry) -> Result<bool> {
        self.context.bind()?;
        // How a launch begins is no question of room, but clusters must be named, those of one block too.
        let mut attributes = [clusters_of(geometry.cluster.max(1))];
        let config = self.config(geometry, &mut attributes);
        let mut clusters = 0;
        // SAFETY: the function lives; `config` names one initialised attribute, which is read alone; writes
        // one integer.
        check("cuOccupancyMaxActiveClusters", unsafe {
            sys::cuOccupancyMaxActiveClusters(&mut clusters, function.raw(), &config)
        })?;
        let blocks: u64 = geometry.grid.iter().map(|&blocks| u64::from(blocks)).product();
        let wanted = blocks / u64::from(geometry.cluster.max(1));
        Ok(wanted <= u64::from(clusters.unsigned_abs()))
    }
}

/// The attributes that a form of launch asks of the driver, and how many they are.
fn attributes(context: &Context, geometry: Geometry) -> ([sys::CUlaunchAttribute; 2], usize) {
    let unused = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    let (mut attributes, mut count) = ([unused; 2], 0);
    let mut push = |attribute| {
        attributes[count] = attribute;
        count += 1;
    };
    if geometry.begin == Begin::Overlapped && context.limits().overlap {
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        push(sys::CUlaunchAttribute { id, pad: [0; 4], value });
    }
    if geometry.cluster > 1 {
        push(clusters_of(geometry.cluster));
    }
    (attributes, count)
}

fn clusters_of(blocks: u32) -> sys::CUlaunchAttribute {
    let dim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { clusterDim: dim },
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: made once in `new`; the driver finishes what is enqueued before it frees the stream.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_launch_gets_is_told() {
        let most = Geometry::new([i32::MAX as u32, 65_535, 65_535]).shared(1024);
        assert_eq!(most.excess(1024), None);
        let told = |geometry: Geometry, what: &str| {
            let told = geometry.excess(1024).expect("too much");
            assert!(told.contains(what), "{told}");
        };
        told(most.shared(1025), "1025 of 1024 bytes");
        told(Geometry::new([1, 70_000, 1]), "70000 of 65535 blocks along axis 1");
        told(Geometry::new([u32::MAX, 1, 1]), "along axis 0");
    }
}
