//! The handle's way to the engine, which knows the device's type; and how adapters become images.

use std::sync::Arc;
use std::sync::mpsc::{Sender, sync_channel};

use amphora_hal::{Backend, DType};
use amphora_model::LoraSlices;
use amphora_model::adapter::{AdapterBase, AdapterFactors, AdapterOptions};
use amphora_model::adapter_image::AdapterImage;
use amphora_model::source::Source;

use super::inbox::Message;
use crate::adapters::ledger::AdapterKey;
use crate::adapters::reader::{Digest, Origin, ReadImage};
use crate::handle::{Command, Link, LoadError};

/// What a handle holds of an engine on one device.
pub(super) struct DeviceLink<B: Backend> {
    pub sender: Sender<Message<B>>,
    /// `None` without adapters.
    pub packer: Option<Arc<Packer<B>>>,
}

/// Reads adapters and brings them into the device's layout: on the thread of whoever loads one, and later
/// on the reader's.
pub(super) struct Packer<B: Backend> {
    pub device: B,
    pub slices: LoraSlices,
    pub base: AdapterBase,
    pub options: AdapterOptions,
    pub dtype: DType,
}

impl<B: Backend> Packer<B> {
    fn pack(&self, factors: &AdapterFactors) -> amphora_hal::Result<AdapterImage<B>> {
        AdapterImage::pack(&self.device, factors, &self.slices, self.dtype)
    }

    /// For the thread that reads adapters again.
    pub fn reading(self: Arc<Self>) -> ReadImage<B> {
        Box::new(move |source| {
            let factors = AdapterFactors::load(source, &self.base, &self.options)
                .map_err(|refused| refused.to_string())?;
            self.pack(&factors).map_err(|error| error.to_string())
        })
    }
}

impl<B: Backend> Link for DeviceLink<B> {
    fn send(&self, command: Command) -> Result<(), Command> {
        self.sender.send(Message::Command(command)).map_err(|unsent| match unsent.0 {
            Message::Command(command) => command,
            Message::Stage { .. } => unreachable!("a command was sent"),
        })
    }

    fn read(&self, source: &Source) -> Result<AdapterFactors, LoadError> {
        let packer = self.packer.as_ref().ok_or(LoadError::Off)?;
        Ok(AdapterFactors::load(source, &packer.base, &packer.options)?)
    }

    fn load(
        &self,
        name: &str,
        factors: &AdapterFactors,
        source: Option<&Source>,
    ) -> Result<AdapterKey, LoadError> {
        let packer = self.packer.as_ref().ok_or(LoadError::Off)?;
        let image = packer
            .pack(factors)
            .map_err(|reason| LoadError::Pack { name: name.to_owned(), reason })?;
        let origin =
            source.map(|source| Origin { source: source.clone(), digest: Digest::of(&image) });
        let (answer, answered) = sync_channel(1);
        let stage = Message::Stage { name: name.to_owned(), image, origin, answer };
        self.sender.send(stage).map_err(|_| LoadError::Stopped)?;
        match answered.recv() {
            Ok(Ok(key)) => Ok(key),
            Ok(Err(reason)) => Err(LoadError::DoesNotFit { name: name.to_owned(), reason }),
            Err(_) => Err(LoadError::Stopped),
        }
    }
}
