//! The tensors of a model's files, held against what an architecture needs, and their bytes.

use std::collections::BTreeSet;

use amphora_hal::{DType, HostData, HostPart};
use safetensors::Dtype;

use super::load::Request;
use super::{Item, Kind, LoadReport, Part, Stored};
use crate::error::{Result, WeightError};
use crate::files::{FileTensor, ModelFiles, Origin};
use crate::synthetic::numbers::{Numbers, Wanted};

/// Types that numbers can be read from, and that MXFP4 is stored in.
const FLOATS: &str = "F32, F16 or BF16";
const BITS: &str = "U8";
/// Unused tensors that a message shows.
const EXAMPLES: usize = 5;

/// Whether a tensor's name is one of the two that MXFP4 makes of a weight's.
fn is_mxfp4_part(name: &str) -> bool {
    name.ends_with("_blocks") || name.ends_with("_scales")
}

/// Tensors of the files, checked.
pub(super) struct Reader<'a> {
    files: &'a ModelFiles,
    folder: String,
    /// Where there are no files, what all tensors are cut from.
    made: Option<Numbers>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(request: &Request<'a>) -> Self {
        let made = match request.files.origin() {
            Origin::Files => None,
            Origin::Synthetic(spread) => {
                let tensors: Vec<_> = request.items.iter().flat_map(Item::tensors).collect();
                let wanted: Vec<Wanted<'_>> =
                    tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
                Some(Numbers::new(&wanted, spread))
            }
        };
        Reader { files: request.files, folder: request.files.name(), made }
    }

    /// Every tensor that is needed is there in its shape and of a type that can be read, and no other is.
    pub(super) fn check(&self, request: &Request<'_>) -> Result<LoadReport> {
        let mut faults = Vec::new();
        let report = self.examine(request, &mut faults);
        faults.into_iter().next().map_or(Ok(report), |first| Err(first.into()))
    }

    /// The same with everything that is wrong.
    pub(super) fn examine(
        &self,
        request: &Request<'_>,
        faults: &mut Vec<WeightError>,
    ) -> LoadReport {
        let mut report = LoadReport::default();
        if self.made.is_some() {
            return report; // Whatever is asked for will be there.
        }
        let mut used = BTreeSet::new();
        for item in request.items {
            if let (Kind::Matrix { k, .. }, true) = (&item.kind, item.is_mxfp4())
                && !k.is_multiple_of(32)
            {
                faults.push(WeightError::Unsupported {
                    folder: self.folder.clone(),
                    what: format!("MXFP4 weight `{}` has {k} inputs", item.key),
                    expected: "a multiple of 32",
                });
            }
            let unlike = self.unlike_expert(item);
            for (name, shape) in item.tensors() {
                match (self.need(&name, &shape), &unlike) {
                    (Ok(tensor), _) => {
                        let bits = item.is_mxfp4() && is_mxfp4_part(&name);
                        faults.extend(self.other_type(&name, tensor.dtype, bits));
                        if !used.contains(&name) {
                            report.tensors += 1;
                            report.file_bytes += tensor.bytes.len();
                        }
                    }
                    // Told below, as what it is.
                    (Err(_), Some(WeightError::UnlikeExperts { tensor, .. }))
                        if *tensor == name => {}
                    (Err(fault), _) => faults.push(fault),
                }
                used.insert(name);
            }
            faults.extend(unlike);
        }
        let unused: Vec<&str> = self
            .files
            .names()
            .filter(|name| !used.contains(*name) && !(request.ignorable)(name))
            .filter(|name| !self.is_copy(name, request.copy))
            .collect();
        if !unused.is_empty() {
            faults.push(WeightError::Unused {
                folder: self.folder.clone(),
                architecture: request.architecture,
                count: unused.len(),
                examples: unused.iter().take(EXAMPLES).map(|n| (*n).to_owned()).collect(),
            });
        }
        report
    }

    /// Experts of a layer must be alike. Where one is not, and the others are as the configuration
    /// says, the configuration is right and it is the expert that must be named.
    fn unlike_expert(&self, item: &Item) -> Option<WeightError> {
        let Kind::Matrix { k, parts, .. } = &item.kind else {
            return None;
        };
        parts.iter().find_map(|part| {
            let Stored::Separate(names) = &part.stored else {
                return None;
            };
            let others = [part.n, *k];
            let shapes = || names.iter().filter_map(|name| Some((name, self.files.tensor(name)?)));
            let (name, tensor) = shapes().find(|(_, tensor)| tensor.shape != others)?;
            shapes().any(|(_, tensor)| tensor.shape == others).then(|| WeightError::UnlikeExperts {
                folder: self.folder.clone(),
                tensor: name.clone(),
                found: tensor.shape.to_vec(),
                others: others.to_vec(),
            })
        })
    }

    /// What is wrong with a tensor's type, if anything is; `bits` wants blocks or scales.
    fn other_type(&self, name: &str, found: Dtype, bits: bool) -> Option<WeightError> {
        let (sound, expected) = match bits {
            true => (found == Dtype::U8, BITS),
            false => (matches!(found, Dtype::F32 | Dtype::F16 | Dtype::BF16), FLOATS),
        };
        (!sound).then(|| self.wrong_type(name, found, expected))
    }

    fn is_copy(&self, name: &str, copy: Option<(&str, &str)>) -> bool {
        let Some((copy, original)) = copy.filter(|(copy, _)| *copy == name) else {
            return false;
        };
        match (self.files.tensor(copy), self.files.tensor(original)) {
            (Some(a), Some(b)) => (a.dtype, a.shape, a.bytes) == (b.dtype, b.shape, b.bytes),
            _ => false,
        }
    }

    fn need(
        &self,
        name: &str,
        shape: &[usize],
    ) -> std::result::Result<FileTensor<'a>, WeightError> {
        let folder = || self.folder.clone();
        let Some(tensor) = self.files.tensor(name) else {
            let (tensor, expected) = (name.to_owned(), shape.to_vec());
            return Err(WeightError::Missing { folder: folder(), tensor, expected });
        };
        if tensor.shape != shape {
            return Err(WeightError::Shape {
                folder: folder(),
                tensor: name.to_owned(),
                found: tensor.shape.to_vec(),
                expected: shape.to_vec(),
            });
        }
        Ok(tensor)
    }

    pub(super) fn float(&self, name: &str, shape: &[usize]) -> Result<(DType, &[u8])> {
        if let Some(numbers) = &self.made {
            let elements = shape.iter().product();
            return numbers.of(name, elements).ok_or_else(|| {
                let what = format!("`{name}` of {elements} numbers was not counted");
                amphora_hal::Error::invalid("synthetic", what).into()
            });
        }
        let tensor = self.need(name, shape)?;
        let dtype = match tensor.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(self.wrong_type(name, other, FLOATS).into()),
        };
        Ok((dtype, tensor.bytes))
    }

    fn bytes(&self, name: &str, shape: &[usize]) -> Result<&'a [u8]> {
        let tensor = self.need(name, shape)?;
        match tensor.dtype {
            Dtype::U8 => Ok(tensor.bytes),
            other => Err(self.wrong_type(name, other, BITS).into()),
        }
    }

    fn wrong_type(&self, name: &str, found: Dtype, expected: &'static str) -> WeightError {
        WeightError::DType {
            folder: self.folder.clone(),
            tensor: name.to_owned(),
            found: format!("{found:?}"),
            expected,
        }
    }

    pub(super) fn stored_bytes(&self, item: &Item) -> usize {
        item.tensors()
            .iter()
            .filter_map(|(name, _)| Some(self.files.tensor(name)?.bytes.len()))
            .sum()
    }

    /// The numbers of `part`; `each` holds those that lie apart.
    pub(super) fn host_part<'p>(
        &'p self,
        part: &Part,
        tensors: &[(String, Vec<usize>)],
        each: &'p [(DType, &'p [u8])],
    ) -> Result<HostPart<'p>> {
        let (name, shape) = &tensors[0];
        let data = match part.stored {
            Stored::RowMajor(_) => {
                let (dtype, bytes) = self.float(name, shape)?;
                HostData::RowMajor(dtype, bytes)
            }
            Stored::Experts(_) => {
                let (dtype, bytes) = self.float(name, shape)?;
                match self.made {
                    // Made numbers are as good in any order, and this one needs no second pass.
                    Some(_) => HostData::RowMajor(dtype, bytes),
                    None => HostData::Transposed(dtype, bytes),
                }
            }
            Stored::Separate(_) => HostData::Separate(each),
            Stored::Mxfp4(_) => HostData::Mxfp4 {
                blocks: self.bytes(name, shape)?,
                scales: self.bytes(&tensors[1].0, &tensors[1].1)?,
            },
        };
        Ok(HostPart { n: part.n, data })
    }

    /// The tensors of a part that has one for each matrix; of others, none.
    pub(super) fn each(
        &self,
        part: &Part,
        tensors: &[(String, Vec<usize>)],
    ) -> Result<Vec<(DType, &[u8])>> {
        match part.stored {
            Stored::Separate(_) => tensors.iter().map(|(t, shape)| self.float(t, shape)).collect(),
            _ => Ok(Vec::new()),
        }
    }
}
