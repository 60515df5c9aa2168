//! Tensors of a model folder → weights on a device.
//!
//! An architecture first *describes* what it needs ([`Item`]s), then the bytes are counted, reserved
//! once, and filled. Every tensor is held against the shape that the configuration gives it; a tensor
//! that nothing needs is an error too, since it means another model or a format not understood.

mod load;
mod read;

use std::collections::BTreeMap;

use amphora_hal::{Backend, DType, Error as DeviceError, Tensor, Weight};

use crate::config::RopeConfig;
use crate::error::{Error, Result};

#[cfg(test)]
pub(crate) use load::check;
pub(crate) use load::{Request, examine, load};

/// One thing that an architecture needs on the device, under a name of its own.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    /// As [`Store`] knows it.
    pub(crate) key: String,
    pub(crate) kind: Kind,
}

impl Item {
    pub(crate) fn new(key: &str, kind: Kind) -> Self {
        Item { key: key.to_owned(), kind }
    }

    /// One tensor as f32.
    pub(crate) fn vector(key: &str, tensor: &str, dims: &[usize]) -> Self {
        let tensors = vec![(tensor.to_owned(), dims.to_vec())];
        Item::new(key, Kind::Vector { dims: dims.to_vec(), tensors })
    }

    /// A dense projection of `k` inputs, from one or more Linears: (tensor, outputs).
    pub(crate) fn linear(key: &str, k: usize, parts: &[(&str, usize)]) -> Self {
        let part =
            |&(tensor, n): &(&str, usize)| Part { n, stored: Stored::RowMajor(tensor.to_owned()) };
        Item::new(key, Kind::Matrix { matrices: 1, k, parts: parts.iter().map(part).collect() })
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// A product's weight, packed; the outputs of its parts lie one after another.
    Matrix { matrices: usize, k: usize, parts: Vec<Part> },
    /// Vectors widened to f32 (norms, biases, sinks), one after another; `dims` is the whole.
    Vector { dims: Vec<usize>, tensors: Vec<(String, Vec<usize>)> },
    /// A table in the compute type (embeddings).
    Table { tensor: String, dims: [usize; 2] },
    /// Rotary positions, which are computed, not read: not before they are wanted, as a configuration
    /// whose tensors are refused may ask for more of them than there is memory.
    Rotary { dims: [usize; 2], rope: RopeConfig },
}

/// Outputs of a matrix that are stored together.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) n: usize,
    pub(crate) stored: Stored,
}

/// The tensors that hold a part, and how they lay it out.
#[derive(Debug, Clone)]
pub(crate) enum Stored {
    /// `[n, k]`, as a Linear has it.
    RowMajor(String),
    /// `[matrices, k, n]`: gpt_oss experts.
    Experts(String),
    /// `[n, k]` of each matrix, as a Linear has it.
    Separate(Vec<String>),
    /// `{name}_blocks` `[matrices, n, k/32, 16]` and `{name}_scales` `[matrices, n, k/32]`.
    Mxfp4(String),
}

/// How to load.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Compute type: weights are packed to it.
    pub dtype: DType,
    /// Positions the rotary table must have; at most those the model is made for.
    pub positions: usize,
}

/// How far loading is.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// Device bytes that are filled.
    pub done: usize,
    /// Device bytes in all.
    pub total: usize,
    /// What was filled last.
    pub item: &'a str,
}

/// What was loaded, for the start-up report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadReport {
    /// Tensors read.
    pub tensors: usize,
    /// Their bytes in the files.
    pub file_bytes: usize,
    /// Bytes reserved from the weights pool.
    pub device_bytes: usize,
    /// Of those, bytes of tensors that are there a second time. A tied embedding is, where packing does not
    /// leave rows as they are: the head reads it as a product's weight, packed, the embedding row by row.
    pub repeated_bytes: usize,
    /// Experts that were stored in MXFP4 and are dense now.
    pub dequantised: Option<Dequantised>,
}

/// What dequantising at load costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dequantised {
    /// Bytes of blocks and scales in the files.
    pub file_bytes: usize,
    /// Bytes of the same weights on the device.
    pub device_bytes: usize,
    /// What they are on the device.
    pub dtype: DType,
}

impl std::fmt::Display for LoadReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mb = |bytes: usize| bytes as f64 / 1e6;
        write!(
            f,
            "{} tensors, {:.1} MB in files, {:.1} MB on the device",
            self.tensors,
            mb(self.file_bytes),
            mb(self.device_bytes)
        )?;
        if self.repeated_bytes > 0 {
            let repeated = mb(self.repeated_bytes);
            write!(f, "; of these {repeated:.1} MB again for the tied head, packed")?;
        }
        if let Some(d) = &self.dequantised {
            write!(
                f,
                "; MXFP4 experts are dequantised to {}: {:.1} MB instead of {:.1} MB",
                d.dtype,
                mb(d.device_bytes),
                mb(d.file_bytes)
            )?;
        }
        Ok(())
    }
}

/// What was loaded, by the keys of the items; layers take their weights out of it.
#[derive(Debug)]
pub(crate) struct Store<B: Backend> {
    matrices: BTreeMap<String, Weight<B>>,
    tensors: BTreeMap<String, Tensor<B>>,
}

impl<B: Backend> Store<B> {
    pub(crate) fn matrix(&mut self, key: &str) -> Result<Weight<B>> {
        self.matrices.remove(key).ok_or_else(|| undescribed(key))
    }

    pub(crate) fn tensor(&mut self, key: &str) -> Result<Tensor<B>> {
        self.tensors.remove(key).ok_or_else(|| undescribed(key))
    }

    /// A table that stays where it is, and came in front of who asks.
    fn table(&self, key: &str) -> Result<&Tensor<B>> {
        self.tensors.get(key).ok_or_else(|| undescribed(key))
    }

    /// A tensor that the configuration makes optional: there if it was described.
    pub(crate) fn optional(&mut self, key: &str) -> Option<Tensor<B>> {
        self.tensors.remove(key)
    }
}

/// A layer asks for what its own description left out: our bug.
fn undescribed(key: &str) -> Error {
    DeviceError::invalid("weights", format!("`{key}` was never described")).into()
}
