//! Counting, reserving and filling the weights pool.

use std::collections::{BTreeMap, BTreeSet};

use amphora_hal::{
    Backend, Carver, Ctx, DType, HostBytes, HostWeight, HostWeightMeta, Pool, Scheme, Span, Tensor,
    Weight, carved_bytes, narrow, widen,
};

use super::read::Reader;
use super::{Dequantised, Item, Kind, LoadOptions, LoadReport, Part, Progress, Store, Stored};
use crate::error::Result;
use crate::files::ModelFiles;
use crate::rope::rope_table;

/// Host bytes through which tables and vectors go up.
const STAGING: usize = 8 << 20;

/// What a load is made of, beside the device.
pub(crate) struct Request<'a> {
    pub(crate) files: &'a ModelFiles,
    pub(crate) items: &'a [Item],
    pub(crate) options: LoadOptions,
    pub(crate) architecture: &'static str,
    /// Whether a tensor that nothing needs may be there all the same.
    pub(crate) ignorable: fn(&str) -> bool,
    /// A tensor that nothing needs and may be there if it equals another: (it, the other). Some
    /// writers store a tied head beside its embedding.
    pub(crate) copy: Option<(&'static str, &'static str)>,
}

/// Checks every tensor, reserves the sum, and fills it.
pub(crate) fn load<B: Backend>(
    request: &Request<'_>,
    cx: &mut Ctx<'_, B>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(Store<B>, LoadReport)> {
    let reader = Reader::new(request);
    let mut report = reader.check(request)?;
    let sizes = sizes(request, cx.device)?;
    report.device_bytes = total(&sizes)?;
    report.repeated_bytes = repeated_bytes(request.items, &sizes);
    let buffer = cx.device.reserve(Pool::Weights, report.device_bytes)?;
    let mut filler = Filler {
        reader: &reader,
        dtype: request.options.dtype,
        carver: Carver::new(buffer),
        staging: Some(cx.device.reserve_host(STAGING.min(report.device_bytes))?),
        items: request.items,
        store: Store { matrices: BTreeMap::new(), tensors: BTreeMap::new() },
    };
    let mut done = 0;
    for (item, size) in request.items.iter().zip(sizes) {
        filler.fill(item, cx)?;
        done += size;
        if item.is_mxfp4() {
            let d = report.dequantised.get_or_insert(Dequantised {
                file_bytes: 0,
                device_bytes: 0,
                dtype: request.options.dtype,
            });
            d.file_bytes += reader.stored_bytes(item);
            d.device_bytes += size;
        }
        progress(Progress { done, total: report.device_bytes, item: &item.key });
    }
    Ok((filler.store, report))
}

/// The checks alone: what [`load`] would read.
#[cfg(test)]
pub(crate) fn check(request: &Request<'_>) -> Result<LoadReport> {
    Reader::new(request).check(request)
}

/// What [`load`] would read and take, and all that is wrong.
pub(crate) fn examine<B: Backend>(
    request: &Request<'_>,
    device: &B,
) -> (LoadReport, Vec<crate::Error>) {
    let mut faults = Vec::new();
    let mut report = Reader::new(request).examine(request, &mut faults);
    let mut faults: Vec<crate::Error> = faults.into_iter().map(Into::into).collect();
    let sizes = sizes(request, device).and_then(|sizes| Ok((total(&sizes)?, sizes)));
    match sizes {
        Ok((bytes, sizes)) => {
            report.device_bytes = bytes;
            report.repeated_bytes = repeated_bytes(request.items, &sizes);
        }
        Err(error) => faults.push(error),
    }
    (report, faults)
}

/// Bytes each item takes from the pool.
fn sizes<B: Backend>(request: &Request<'_>, device: &B) -> Result<Vec<usize>> {
    let dtype = request.options.dtype;
    request
        .items
        .iter()
        .map(|item| {
            Ok(match &item.kind {
                Kind::Matrix { .. } if rows_of(request.items, item, device).is_some() => 0,
                Kind::Matrix { .. } => {
                    carved_bytes(&[device.packed_bytes(&item.meta(dtype))?], DType::U8)
                }
                Kind::Vector { dims, .. } => carved_bytes(dims, DType::F32),
                Kind::Table { dims, .. } => carved_bytes(dims, dtype),
                Kind::Rotary { dims, .. } => carved_bytes(dims, DType::F32),
            })
        })
        .collect()
}

/// The table whose rows are a matrix, so that on a device that packs rows as they are the matrix needs no memory
/// of its own: the embedding of a tied head.
fn rows_of<'a, B: Backend>(items: &'a [Item], item: &Item, device: &B) -> Option<&'a Item> {
    let Kind::Matrix { matrices: 1, parts, .. } = &item.kind else { return None };
    let [Part { stored: Stored::RowMajor(name), .. }] = parts.as_slice() else { return None };
    let is = |of: &&Item| matches!(&of.kind, Kind::Table { tensor, .. } if tensor == name);
    items.iter().find(is).filter(|_| device.caps().packs_rows)
}

/// Bytes of all items.
fn total(sizes: &[usize]) -> Result<usize> {
    let sum = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
    sum.ok_or_else(|| {
        let what = format!("{} items are more bytes than can be counted", sizes.len());
        amphora_hal::Error::invalid("weights", what).into()
    })
}

/// Bytes of items whose tensors all belong to earlier items too.
fn repeated_bytes(items: &[Item], sizes: &[usize]) -> usize {
    let mut seen = BTreeSet::new();
    let mut repeated = 0;
    for (item, size) in items.iter().zip(sizes) {
        let tensors = item.tensors();
        let known = tensors.iter().filter(|(name, _)| !seen.insert(name.clone())).count();
        if known > 0 && known == tensors.len() {
            repeated += size;
        }
    }
    repeated
}

impl Item {
    /// The logical form of a matrix.
    fn meta(&self, dtype: DType) -> HostWeightMeta {
        let (matrices, n, k) = match &self.kind {
            Kind::Matrix { matrices, k, parts } => (*matrices, parts.iter().map(|p| p.n).sum(), *k),
            Kind::Vector { .. } | Kind::Table { .. } | Kind::Rotary { .. } => (0, 0, 0),
        };
        HostWeightMeta { matrices, n, k, scheme: Scheme::Dense(dtype) }
    }

    pub(super) fn is_mxfp4(&self) -> bool {
        let Kind::Matrix { parts, .. } = &self.kind else {
            return false;
        };
        parts.iter().any(|p| matches!(p.stored, Stored::Mxfp4(_)))
    }

    /// The tensors of the file that this item is made of, with their shapes.
    pub(super) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        match &self.kind {
            Kind::Matrix { matrices, k, parts } => {
                parts.iter().flat_map(|part| part.tensors(*matrices, *k)).collect()
            }
            Kind::Vector { tensors, .. } => tensors.clone(),
            Kind::Table { tensor, dims } => vec![(tensor.clone(), dims.to_vec())],
            Kind::Rotary { .. } => Vec::new(),
        }
    }
}

impl Part {
    pub(super) fn tensors(&self, matrices: usize, k: usize) -> Vec<(String, Vec<usize>)> {
        let n = self.n;
        match &self.stored {
            Stored::RowMajor(name) => vec![(name.clone(), vec![n, k])],
            Stored::Experts(name) => vec![(name.clone(), vec![matrices, k, n])],
            Stored::Separate(names) => {
                names.iter().map(|name| (name.clone(), vec![n, k])).collect()
            }
            Stored::Mxfp4(name) => vec![
                (format!("{name}_blocks"), vec![matrices, n, k / 32, 16]),
                (format!("{name}_scales"), vec![matrices, n, k / 32]),
            ],
        }
    }
}

struct Filler<'r, 'a, B: Backend> {
    reader: &'r Reader<'a>,
    items: &'r [Item],
    dtype: DType,
    carver: Carver<B>,
    /// Always there between two uploads.
    staging: Option<B::Host>,
    store: Store<B>,
}

impl<B: Backend> Filler<'_, '_, B> {
    fn fill(&mut self, item: &Item, cx: &mut Ctx<'_, B>) -> Result<()> {
        let tensor = match &item.kind {
            Kind::Matrix { matrices, k, parts } => {
                if let Some(table) = rows_of(self.items, item, cx.device) {
                    let weight = Weight::of_rows(self.store.table(&table.key)?)?;
                    self.store.matrices.insert(item.key.clone(), weight);
                    return Ok(());
                }
                let meta = item.meta(self.dtype);
                let tensors: Vec<_> =
                    parts.iter().map(|part| part.tensors(*matrices, *k)).collect();
                let apart = parts
                    .iter()
                    .zip(&tensors)
                    .map(|(part, tensors)| self.reader.each(part, tensors))
                    .collect::<Result<Vec<_>>>()?;
                let host_parts = parts
                    .iter()
                    .zip(tensors.iter().zip(&apart))
                    .map(|(part, (tensors, each))| self.reader.host_part(part, tensors, each))
                    .collect::<Result<_>>()?;
                let host = HostWeight::new(meta, host_parts)?;
                let into = self.carver.carve(&[cx.device.packed_bytes(&meta)?], DType::U8)?;
                let weight = cx.device.pack(cx.stream, &host, into)?;
                self.store.matrices.insert(item.key.clone(), weight);
                return Ok(());
            }
            Kind::Vector { dims, tensors } => {
                let mut values = Vec::new();
                for (name, shape) in tensors {
                    let (dtype, bytes) = self.reader.float(name, shape)?;
                    values.extend(widen(dtype, bytes)?);
                }
                let mut tensor = self.carver.carve(dims, DType::F32)?;
                self.upload(&mut tensor, &values, 0, cx)?;
                tensor
            }
            Kind::Rotary { dims, rope } => {
                let mut tensor = self.carver.carve(dims, DType::F32)?;
                let [positions, head_dim] = *dims;
                self.upload(&mut tensor, &rope_table(rope, head_dim, positions), 0, cx)?;
                tensor
            }
            Kind::Table { tensor: name, dims } => {
                let (dtype, bytes) = self.reader.float(name, dims)?;
                let mut tensor = self.carver.carve(dims, self.dtype)?;
                if dtype == self.dtype {
                    self.upload_stored(&mut tensor, bytes, cx)?;
                    self.store.tensors.insert(item.key.clone(), tensor);
                    return Ok(());
                }
                // Piece by piece: an embedding widened whole would be twice its file.
                let piece = STAGING / 4;
                for (index, part) in bytes.chunks(piece * dtype.size()).enumerate() {
                    self.upload(&mut tensor, &widen(dtype, part)?, index * piece, cx)?;
                }
                tensor
            }
        };
        self.store.tensors.insert(item.key.clone(), tensor);
        Ok(())
    }

    /// Rounds `values` to the tensor's type and copies them to its elements from `first` on.
    fn upload(
        &mut self,
        tensor: &mut Tensor<B>,
        values: &[f32],
        first: usize,
        cx: &mut Ctx<'_, B>,
    ) -> Result<()> {
        let (dtype, size) = (tensor.dtype(), tensor.dtype().size());
        let mut to = first * size;
        for piece in values.chunks(STAGING / 4) {
            let len = piece.len() * size;
            self.send(tensor, Span { from: 0, to, len }, |bytes| narrow(piece, dtype, bytes), cx)?;
            to += len;
        }
        Ok(())
    }

    /// Copies `bytes`, which are numbers of the tensor's type, to its front.
    fn upload_stored(
        &mut self,
        tensor: &mut Tensor<B>,
        bytes: &[u8],
        cx: &mut Ctx<'_, B>,
    ) -> Result<()> {
        for (index, piece) in bytes.chunks(STAGING).enumerate() {
            let span = Span { from: 0, to: index * STAGING, len: piece.len() };
            self.send(tensor, span, |bytes| bytes.copy_from_slice(piece), cx)?;
        }
        Ok(())
    }

    /// Sends what `fill` writes to the front of the staging bytes, and waits.
    fn send(
        &mut self,
        tensor: &mut Tensor<B>,
        span: Span,
        fill: impl FnOnce(&mut [u8]),
        cx: &mut Ctx<'_, B>,
    ) -> Result<()> {
        let mut host = match self.staging.take() {
            Some(host) => host,
            None => cx.device.reserve_host(STAGING)?,
        };
        let Some(bytes) = host.bytes_mut().get_mut(..span.len) else {
            let what = format!("{} bytes in a smaller staging buffer", span.len);
            return Err(amphora_hal::Error::invalid("weights", what).into());
        };
        fill(bytes);
        let sent = cx.device.upload(cx.stream, host, &[span], tensor);
        self.staging = Some(sent.map_err(amphora_hal::Error::from)?.finish()?);
        Ok(())
    }
}
