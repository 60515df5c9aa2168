//! Counting, reserving and filling the weights pool.

use std::collections::{BTreeMap, BTreeSet};

use amphora_hal::{
    Backend, Carver, Ctx, DType, HostBytes, HostData, HostPart, HostWeight, HostWeightMeta, Pool,
    Scheme, Span, Tensor, carved_bytes, narrow, widen,
};
use safetensors::Dtype;

use super::{Dequantised, Item, Kind, Layout, LoadOptions, LoadReport, Part, Progress, Store};
use crate::error::{Result, WeightError};
use crate::files::{FileTensor, ModelFiles};

/// Host bytes through which tables and vectors go up.
const STAGING: usize = 8 << 20;
/// Unused tensors that a message shows.
const EXAMPLES: usize = 5;

/// What a load is made of, beside the device.
pub(crate) struct Request<'a> {
    pub(crate) files: &'a ModelFiles,
    pub(crate) items: &'a [Item],
    pub(crate) options: LoadOptions,
    pub(crate) architecture: &'static str,
    /// Whether a tensor that nothing needs may be there all the same.
    pub(crate) ignorable: fn(&str) -> bool,
}

/// Checks every tensor, reserves the sum, and fills it.
pub(crate) fn load<B: Backend>(
    request: &Request<'_>,
    cx: &mut Ctx<'_, B>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(Store<B>, LoadReport)> {
    let reader = Reader { files: request.files, folder: request.files.name() };
    let mut report = reader.check(request)?;
    let sizes = sizes(request, cx.device)?;
    report.device_bytes = sizes.iter().sum();
    let buffer = cx.device.reserve(Pool::Weights, report.device_bytes)?;
    let mut filler = Filler {
        reader: &reader,
        dtype: request.options.dtype,
        carver: Carver::new(buffer),
        staging: Some(cx.device.reserve_host(STAGING.min(report.device_bytes))?),
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
    let reader = Reader { files: request.files, folder: request.files.name() };
    reader.check(request)
}

/// Bytes each item takes from the pool.
fn sizes<B: Backend>(request: &Request<'_>, device: &B) -> Result<Vec<usize>> {
    let dtype = request.options.dtype;
    request
        .items
        .iter()
        .map(|item| {
            Ok(match &item.kind {
                Kind::Matrix { .. } => {
                    carved_bytes(&[device.packed_bytes(&item.meta(dtype))?], DType::U8)
                }
                Kind::Vector { dims, .. } => carved_bytes(dims, DType::F32),
                Kind::Table { dims, .. } => carved_bytes(dims, dtype),
                Kind::Computed { dims, .. } => carved_bytes(dims, DType::F32),
            })
        })
        .collect()
}

impl Item {
    /// The logical form of a matrix.
    fn meta(&self, dtype: DType) -> HostWeightMeta {
        let (matrices, n, k) = match &self.kind {
            Kind::Matrix { matrices, k, parts } => (*matrices, parts.iter().map(|p| p.n).sum(), *k),
            Kind::Vector { .. } | Kind::Table { .. } | Kind::Computed { .. } => (0, 0, 0),
        };
        HostWeightMeta { matrices, n, k, scheme: Scheme::Dense(dtype) }
    }

    fn is_mxfp4(&self) -> bool {
        let Kind::Matrix { parts, .. } = &self.kind else {
            return false;
        };
        parts.iter().any(|p| p.layout == Layout::Mxfp4)
    }

    /// The tensors of the file that this item is made of, with their shapes.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        match &self.kind {
            Kind::Matrix { matrices, k, parts } => {
                parts.iter().flat_map(|part| part.tensors(*matrices, *k)).collect()
            }
            Kind::Vector { tensors, .. } => tensors.clone(),
            Kind::Table { tensor, dims } => vec![(tensor.clone(), dims.to_vec())],
            Kind::Computed { .. } => Vec::new(),
        }
    }
}

impl Part {
    fn tensors(&self, matrices: usize, k: usize) -> Vec<(String, Vec<usize>)> {
        match self.layout {
            Layout::RowMajor => vec![(self.tensor.clone(), vec![self.n, k])],
            Layout::Experts => vec![(self.tensor.clone(), vec![matrices, k, self.n])],
            Layout::Mxfp4 => vec![
                (self.blocks(), vec![matrices, self.n, k / 32, 16]),
                (self.scales(), vec![matrices, self.n, k / 32]),
            ],
        }
    }

    fn blocks(&self) -> String {
        format!("{}_blocks", self.tensor)
    }

    fn scales(&self) -> String {
        format!("{}_scales", self.tensor)
    }
}

/// Tensors of the files, checked.
struct Reader<'a> {
    files: &'a ModelFiles,
    folder: String,
}

impl<'a> Reader<'a> {
    /// Every tensor that is needed is there in its shape, and no other is.
    fn check(&self, request: &Request<'_>) -> Result<LoadReport> {
        let mut used = BTreeSet::new();
        let mut report = LoadReport::default();
        for item in request.items {
            if let (Kind::Matrix { k, .. }, true) = (&item.kind, item.is_mxfp4())
                && !k.is_multiple_of(32)
            {
                return Err(WeightError::Unsupported {
                    folder: self.folder.clone(),
                    what: format!("MXFP4 weight `{}` has {k} inputs", item.key),
                    expected: "a multiple of 32",
                }
                .into());
            }
            for (name, shape) in item.tensors() {
                let tensor = self.need(&name, &shape)?;
                if used.insert(name) {
                    report.tensors += 1;
                    report.file_bytes += tensor.bytes.len();
                }
            }
        }
        let unused: Vec<&str> = self
            .files
            .names()
            .filter(|name| !used.contains(*name) && !(request.ignorable)(name))
            .collect();
        if unused.is_empty() {
            return Ok(report);
        }
        Err(WeightError::Unused {
            folder: self.folder.clone(),
            architecture: request.architecture,
            count: unused.len(),
            examples: unused.iter().take(EXAMPLES).map(|n| (*n).to_owned()).collect(),
        }
        .into())
    }

    fn need(&self, name: &str, shape: &[usize]) -> Result<FileTensor<'a>> {
        let Some(tensor) = self.files.tensor(name) else {
            return Err(WeightError::Missing {
                folder: self.folder.clone(),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
            }
            .into());
        };
        if tensor.shape != shape {
            return Err(WeightError::Shape {
                folder: self.folder.clone(),
                tensor: name.to_owned(),
                found: tensor.shape.to_vec(),
                expected: shape.to_vec(),
            }
            .into());
        }
        Ok(tensor)
    }

    fn float(&self, name: &str, shape: &[usize]) -> Result<(DType, &'a [u8])> {
        let tensor = self.need(name, shape)?;
        let dtype = match tensor.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(self.wrong_type(name, other, "F32, F16 or BF16")),
        };
        Ok((dtype, tensor.bytes))
    }

    fn bytes(&self, name: &str, shape: &[usize]) -> Result<&'a [u8]> {
        let tensor = self.need(name, shape)?;
        match tensor.dtype {
            Dtype::U8 => Ok(tensor.bytes),
            other => Err(self.wrong_type(name, other, "U8")),
        }
    }

    fn wrong_type(&self, name: &str, found: Dtype, expected: &'static str) -> crate::Error {
        WeightError::DType {
            folder: self.folder.clone(),
            tensor: name.to_owned(),
            found: format!("{found:?}"),
            expected,
        }
        .into()
    }

    fn stored_bytes(&self, item: &Item) -> usize {
        item.tensors()
            .iter()
            .filter_map(|(name, _)| Some(self.files.tensor(name)?.bytes.len()))
            .sum()
    }

    fn host_part(&self, part: &Part, matrices: usize, k: usize) -> Result<HostPart<'a>> {
        let tensors = part.tensors(matrices, k);
        let data = match part.layout {
            Layout::RowMajor | Layout::Experts => {
                let (name, shape) = &tensors[0];
                let (dtype, bytes) = self.float(name, shape)?;
                match part.layout {
                    Layout::RowMajor => HostData::RowMajor(dtype, bytes),
                    _ => HostData::Transposed(dtype, bytes),
                }
            }
            Layout::Mxfp4 => HostData::Mxfp4 {
                blocks: self.bytes(&tensors[0].0, &tensors[0].1)?,
                scales: self.bytes(&tensors[1].0, &tensors[1].1)?,
            },
        };
        Ok(HostPart { n: part.n, data })
    }
}

struct Filler<'r, 'a, B: Backend> {
    reader: &'r Reader<'a>,
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
                let meta = item.meta(self.dtype);
                let parts = parts
                    .iter()
                    .map(|part| self.reader.host_part(part, *matrices, *k))
                    .collect::<Result<_>>()?;
                let host = HostWeight::new(meta, parts)?;
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
            Kind::Computed { dims, values } => {
                let mut tensor = self.carver.carve(dims, DType::F32)?;
                self.upload(&mut tensor, values, 0, cx)?;
                tensor
            }
            Kind::Table { tensor: name, dims } => {
                let (dtype, bytes) = self.reader.float(name, dims)?;
                let mut tensor = self.carver.carve(dims, self.dtype)?;
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
        let size = tensor.dtype().size();
        let mut at = first;
        for piece in values.chunks(STAGING / 4) {
            let len = piece.len() * size;
            let mut host = match self.staging.take() {
                Some(host) => host,
                None => cx.device.reserve_host(STAGING)?,
            };
            let Some(bytes) = host.bytes_mut().get_mut(..len) else {
                let what = format!("{len} bytes in a smaller staging buffer");
                return Err(amphora_hal::Error::invalid("weights", what).into());
            };
            narrow(piece, tensor.dtype(), bytes);
            let span = Span { from: 0, to: at * size, len };
            let sent = cx.device.upload(cx.stream, host, &[span], tensor);
            let sent = sent.map_err(amphora_hal::Error::from)?;
            self.staging = Some(sent.finish()?);
            at += piece.len();
        }
        Ok(())
    }
}
