//! The loaded kernels of one device.

use std::sync::Arc;

use amphora_cuda_kernels::{Args, Entry, KernelId};
use amphora_hal::{DType, Error, Result};

use crate::driver::{Context, Function, Module};
use crate::jit::{ELEMENTS, JitConfig, load_all};

/// A function for each kernel and element type; kernels without an element type have it under each.
#[derive(Debug)]
pub(crate) struct Kernels(Vec<[Option<Function>; ELEMENTS.len()]>);

impl Kernels {
    /// Loads every unit for `architecture`, compiling what no cache holds.
    pub(crate) fn load(
        context: &Arc<Context>,
        config: &JitConfig,
        architecture: &str,
    ) -> Result<Self> {
        let mut functions: Vec<[Option<Function>; ELEMENTS.len()]> =
            KernelId::ALL.iter().map(|_| Default::default()).collect();
        for (unit, cubin) in load_all(config, architecture)? {
            let module = Module::load(context, &cubin)?;
            for id in unit.source.kernels() {
                let function = module.function(id.kernel().name)?;
                for (slot, dtype) in functions[id as usize].iter_mut().zip(ELEMENTS) {
                    if unit.element.is_none_or(|element| element == dtype) {
                        *slot = Some(function.clone());
                    }
                }
            }
        }
        Ok(Kernels(functions))
    }

    /// The kernel at an element type.
    pub(crate) fn get<A: Args>(&self, entry: Entry<A>, element: DType) -> Result<&Function> {
        let at = ELEMENTS.iter().position(|&dtype| dtype == element);
        at.and_then(|at| self.0[entry.id() as usize][at].as_ref()).ok_or_else(|| {
            let name = entry.id().kernel().name;
            Error::invalid("launch", format!("kernel {name} has no version for {element}"))
        })
    }
}
