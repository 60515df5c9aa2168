//! The loaded kernels of one device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use amphora_cuda_kernels::{Args, Entry, KernelId};
use amphora_hal::{DType, Error, Result};

use crate::driver::{Context, Function, Module};
use crate::jit::{ELEMENTS, JitConfig, Unit, Variant, load_all, load_one};

/// A function for each kernel and element type; kernels without an element type have it under each.
#[derive(Debug)]
pub(crate) struct Kernels {
    fixed: Vec<[Option<Function>; ELEMENTS.len()]>,
    /// Those made for some constants, such as the width of a product, compiled when they are first used: in
    /// a server, by the steps that warm it up.
    variants: Mutex<HashMap<(KernelId, DType, Variant), Function>>,
    compiled: AtomicU64,
    loaded: AtomicU64,
    context: Arc<Context>,
    config: JitConfig,
    architecture: String,
}

/// What it took to have the kernels so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Made {
    /// Units that no cache held.
    pub(crate) compiled: u64,
    /// Modules that were loaded.
    pub(crate) loaded: u64,
}

impl Kernels {
    /// Loads every unit for `architecture`, and the variants that are `asked` for, compiling what no cache
    /// holds.
    pub(crate) fn load(
        context: &Arc<Context>,
        config: JitConfig,
        architecture: &str,
        asked: &[Unit],
    ) -> Result<Self> {
        let mut fixed: Vec<[Option<Function>; ELEMENTS.len()]> =
            KernelId::ALL.iter().map(|_| Default::default()).collect();
        let mut variants = HashMap::new();
        let (mut compiled, mut loaded) = (0, 0);
        for (unit, code) in load_all(&config, architecture, asked)? {
            let module = Module::load(context, &code.cubin)
                .map_err(|error| code.refused(error, unit, &config))?;
            compiled += code.compiled();
            loaded += 1;
            for id in unit.source.kernels() {
                let function = module.function(id.kernel().name)?;
                if let (Some(variant), Some(element)) = (unit.variant, unit.element)
                    && !variant.is_first(unit.source)
                {
                    variants.insert((id, element, variant), function);
                    continue;
                }
                for (slot, dtype) in fixed[id as usize].iter_mut().zip(ELEMENTS) {
                    if unit.element.is_none_or(|element| element == dtype) {
                        *slot = Some(function.clone());
                    }
                }
            }
        }
        let (context, architecture) = (context.clone(), architecture.to_owned());
        Ok(Kernels {
            fixed,
            variants: Mutex::new(variants),
            compiled: compiled.into(),
            loaded: loaded.into(),
            context,
            config,
            architecture,
        })
    }

    /// What it took to have them so far.
    pub(crate) fn made(&self) -> Made {
        Made {
            compiled: self.compiled.load(Ordering::Relaxed),
            loaded: self.loaded.load(Ordering::Relaxed),
        }
    }

    /// The kernel at an element type.
    pub(crate) fn get<A: Args>(&self, entry: Entry<A>, element: DType) -> Result<&Function> {
        let at = ELEMENTS.iter().position(|&dtype| dtype == element);
        at.and_then(|at| self.fixed[entry.id() as usize][at].as_ref()).ok_or_else(|| {
            let name = entry.id().kernel().name;
            Error::invalid("launch", format!("kernel {name} has no version for {element}"))
        })
    }

    /// The kernel at an element type and some constants.
    pub(crate) fn variant<A: Args>(
        &self,
        entry: Entry<A>,
        element: DType,
        variant: Variant,
    ) -> Result<Function> {
        if variant.is_first(entry.id().kernel().source) {
            return self.get(entry, element).cloned();
        }
        // A thread that panicked left whole entries behind.
        let mut variants = self.variants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = variants.get(&(entry.id(), element, variant)) {
            return Ok(function.clone());
        }
        let source = entry.id().kernel().source;
        let unit = Unit { source, element: Some(element), variant: Some(variant) };
        let code = load_one(&self.config, &self.architecture, unit)?;
        let module = Module::load(&self.context, &code.cubin)
            .map_err(|error| code.refused(error, unit, &self.config))?;
        self.compiled.fetch_add(code.compiled(), Ordering::Relaxed);
        self.loaded.fetch_add(1, Ordering::Relaxed);
        for id in source.kernels() {
            variants.insert((id, element, variant), module.function(id.kernel().name)?);
        }
        variants.get(&(entry.id(), element, variant)).cloned().ok_or_else(|| {
            Error::invalid("launch", format!("no kernel {}", entry.id().kernel().name))
        })
    }
}
