//! What a handle put on streams: for tests that hold a choice against what became of it.

use std::sync::{Arc, Mutex, PoisonError};

use super::Cuda;
use crate::driver::Geometry;
use crate::jit::Variant;

/// A launch as it was put on a stream, or recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The kernel.
    pub kernel: &'static str,
    /// Constants that it was compiled with, for a kernel that is compiled with several.
    pub constants: Vec<(&'static str, usize)>,
    /// Blocks.
    pub grid: [u32; 3],
    /// Blocks of a cluster.
    pub cluster: u32,
}

/// Launches in the order in which they came.
#[derive(Debug, Default)]
pub struct Launches(Mutex<Vec<Launched>>);

impl Launches {
    /// All so far.
    pub fn all(&self) -> Vec<Launched> {
        // A thread that panicked left whole entries behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn add(&self, kernel: &'static str, variant: Option<Variant>, geometry: Geometry) {
        let constants = variant.map(|variant| variant.constants()).unwrap_or_default();
        let Geometry { grid, cluster, .. } = geometry;
        let launched = Launched { kernel, constants, grid, cluster };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(launched);
    }
}

impl Cuda {
    /// For tests: a handle whose launches are noted, kernels of the vendor's library included.
    #[doc(hidden)]
    pub fn watched(&self) -> (Self, Arc<Launches>) {
        let launches = Arc::new(Launches::default());
        (Cuda { launches: Some(launches.clone()), ..self.clone() }, launches)
    }

    /// Where this handle's launches are noted, if they are.
    pub(crate) fn launches(&self) -> Option<&Launches> {
        self.launches.as_deref()
    }
}
