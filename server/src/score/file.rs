//! The file of scores: for each id `ID.logits` f32 `[T, V]`, `ID.greedy_ids` i64 `[N]` and
//! `ID.greedy_logprobs` f32 `[N]`, in one safetensors file. `tools/peft_golden.py` writes the same.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use thiserror::Error;

const LOGITS: &str = ".logits";
const GREEDY_IDS: &str = ".greedy_ids";
const GREEDY_LOGPROBS: &str = ".greedy_logprobs";

/// What can be wrong with a file of scores.
#[derive(Debug, Error)]
pub enum FileError {
    #[error("{}: {cause}", file.display())]
    Io { file: PathBuf, cause: std::io::Error },
    #[error("{}: not a safetensors file: {cause}", file.display())]
    Format { file: PathBuf, cause: safetensors::SafeTensorError },
    #[error("{}: tensor '{tensor}': expected {expected}, found {found}", file.display())]
    Tensor { file: PathBuf, tensor: String, expected: String, found: String },
    #[error("{}: expected tensors named ID.logits, ID.greedy_ids and ID.greedy_logprobs, found none", file.display())]
    Empty { file: PathBuf },
}

/// What one input line scored.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scored {
    /// [positions, vocab], row-major.
    pub logits: Vec<f32>,
    pub vocab: usize,
    pub greedy_ids: Vec<i64>,
    pub greedy_logprobs: Vec<f32>,
}

impl Scored {
    /// Prompt positions.
    pub fn positions(&self) -> usize {
        self.logits.len().checked_div(self.vocab).unwrap_or(0)
    }

    /// Rows of logits, one for each prompt position.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.logits.chunks_exact(self.vocab.max(1))
    }
}

/// Scores by id.
pub type Scores = BTreeMap<String, Scored>;

/// Writes all scores; an existing file is replaced.
pub fn write(path: &Path, scores: &Scores) -> Result<(), FileError> {
    let format = |cause| FileError::Format { file: path.to_owned(), cause };
    let mut tensors = Vec::with_capacity(3 * scores.len());
    for (id, scored) in scores {
        let mut add = |suffix: &str, dtype, shape: &[usize], bytes| {
            let view = TensorView::new(dtype, shape.to_vec(), bytes).map_err(format)?;
            tensors.push((format!("{id}{suffix}"), view));
            Ok(())
        };
        let answer = [scored.greedy_ids.len()];
        let logits: &[u8] = bytemuck::cast_slice(&scored.logits);
        add(LOGITS, Dtype::F32, &[scored.positions(), scored.vocab], logits)?;
        add(GREEDY_IDS, Dtype::I64, &answer, bytemuck::cast_slice(&scored.greedy_ids))?;
        add(GREEDY_LOGPROBS, Dtype::F32, &answer, bytemuck::cast_slice(&scored.greedy_logprobs))?;
    }
    safetensors::serialize_to_file(tensors, None, path).map_err(format)
}

/// Reads all scores of a file; tensors with other names are left alone.
pub fn read(path: &Path) -> Result<Scores, FileError> {
    let bytes =
        std::fs::read(path).map_err(|cause| FileError::Io { file: path.to_owned(), cause })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|cause| FileError::Format { file: path.to_owned(), cause })?;
    let mut scores = Scores::new();
    for name in file.names() {
        let Some(id) = name.strip_suffix(LOGITS) else {
            continue;
        };
        let get = |suffix: &str, dtype: Dtype, rank: usize| {
            tensor(path, &file, &format!("{id}{suffix}"), dtype, rank)
        };
        let logits = get(LOGITS, Dtype::F32, 2)?;
        let ids = get(GREEDY_IDS, Dtype::I64, 1)?;
        let logprobs = get(GREEDY_LOGPROBS, Dtype::F32, 1)?;
        if ids.shape() != logprobs.shape() {
            return Err(FileError::Tensor {
                file: path.to_owned(),
                tensor: format!("{id}{GREEDY_LOGPROBS}"),
                expected: format!("the shape of {id}{GREEDY_IDS}, {:?}", ids.shape()),
                found: format!("{:?}", logprobs.shape()),
            });
        }
        let scored = Scored {
            vocab: logits.shape()[1],
            logits: f32s(logits.data()),
            greedy_ids: ids.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            greedy_logprobs: f32s(logprobs.data()),
        };
        scores.insert(id.to_owned(), scored);
    }
    if scores.is_empty() {
        return Err(FileError::Empty { file: path.to_owned() });
    }
    Ok(scores)
}

fn tensor<'a>(
    path: &Path,
    file: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    rank: usize,
) -> Result<TensorView<'a>, FileError> {
    let refuse = |found: String| FileError::Tensor {
        file: path.to_owned(),
        tensor: name.to_owned(),
        expected: format!("{dtype:?} of {rank} dimensions"),
        found,
    };
    let view = file.tensor(name).map_err(|_| refuse("no such tensor".to_owned()))?;
    if view.dtype() != dtype || view.shape().len() != rank {
        return Err(refuse(format!("{:?} {:?}", view.dtype(), view.shape())));
    }
    Ok(view)
}

/// The bytes of a file need not be aligned for f32, so they are copied.
fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let path = std::env::temp_dir().join(format!("amphora-scores-{}", std::process::id()));
        let scored = Scored {
            logits: vec![1.0, -2.0, 0.5, 4.0, 5.0, 6.0],
            vocab: 3,
            greedy_ids: vec![2, 1],
            greedy_logprobs: vec![-0.1, -0.2],
        };
        let scores: Scores = [
            ("a/b".to_owned(), scored),
            ("empty".to_owned(), Scored { vocab: 3, ..Scored::default() }),
        ]
        .into();
        write(&path, &scores).expect("write");
        let read_again = read(&path).expect("read");
        std::fs::write(&path, b"not tensors").expect("write");
        let refused = read(&path);
        std::fs::remove_file(&path).expect("remove");
        assert_eq!(read_again, scores);
        assert!(matches!(refused, Err(FileError::Format { .. })));
    }

    #[test]
    fn a_file_without_scores_is_refused() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../assets/demo-model/adapters/math/adapter_model.safetensors"
        );
        assert!(matches!(read(path.as_ref()), Err(FileError::Empty { .. })));
        assert!(matches!(read("/no/such/file".as_ref()), Err(FileError::Io { .. })));
    }
}
