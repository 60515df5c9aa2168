//! The header of a safetensors file, with refusals in words.

use std::path::Path;

use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors};

use crate::error::FileError;

/// Parses and validates the header of `bytes`: offsets in range, without gap or overlap, sizes equal
/// to shape times type, data exactly to the end. Gives the offset of the data and the header.
pub(crate) fn read_header(path: &Path, bytes: &[u8]) -> Result<(usize, Metadata), FileError> {
    let corrupt = |what: String| FileError::Corrupt { path: path.to_owned(), what };
    let announced = bytes.first_chunk::<8>().map(|length| u64::from_le_bytes(*length));
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| {
        let what = match e {
            SafeTensorError::HeaderTooSmall => format!(
                "{} bytes, expected a safetensors file (8 bytes of header length first)",
                bytes.len()
            ),
            SafeTensorError::HeaderTooLarge => format!(
                "the header would be {} bytes, expected at most 100 MB",
                announced.unwrap_or_default()
            ),
            SafeTensorError::InvalidHeaderLength => format!(
                "the header would be {} bytes, but the file has {}: cut short or not safetensors",
                announced.unwrap_or_default(),
                bytes.len()
            ),
            SafeTensorError::MetadataIncompleteBuffer => format!(
                "the file has {} bytes, which is not what its header adds up to: cut short or \
                 written over",
                bytes.len()
            ),
            other => format!("not a sound safetensors header: {other}"),
        };
        corrupt(what)
    })?;
    Ok((8 + header, metadata))
}
