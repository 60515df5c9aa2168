//! Whether bytes are a whole cubin: the driver takes no length, and reads what the file's own header says.

/// What a 64-bit ELF file of this byte order begins with.
const MAGIC: [u8; 6] = *b"\x7fELF\x02\x01";
/// Type of a section that takes no bytes of the file: memory that is made when it is loaded.
const NO_BITS: u64 = 8;

/// A little-endian number of `len` bytes at `at`; `None` behind the end.
fn number(bytes: &[u8], at: u64, len: usize) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let bytes = bytes.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().rev().fold(0, |value, &byte| (value << 8) | u64::from(byte)))
}

/// Whether the header and all that it leads to, both tables and what each entry names, lie within the
/// bytes. One that was cut, anywhere, is not whole. Offsets are those of the System V ABI's ELF-64 format.
pub(crate) fn is_whole(cubin: &[u8]) -> bool {
    ends_by(cubin).is_some_and(|end| end <= cubin.len() as u64)
}

/// Where the last of its parts ends; `None`: it is no ELF file, or a table is cut.
fn ends_by(cubin: &[u8]) -> Option<u64> {
    if !cubin.starts_with(&MAGIC) {
        return None;
    }
    let of = |at, len| number(cubin, at, len);
    let (segments, segment_bytes, segment_count) = (of(0x20, 8)?, of(0x36, 2)?, of(0x38, 2)?);
    let (sections, section_bytes, section_count) = (of(0x28, 8)?, of(0x3a, 2)?, of(0x3c, 2)?);
    // Without sections there is no code, and a file of zeros behind its first block has none.
    if section_count == 0 {
        return None;
    }
    let mut end = sections.checked_add(section_bytes * section_count)?;
    end = end.max(segments.checked_add(segment_bytes * segment_count)?);
    for at in (0..segment_count).map(|i| i * segment_bytes) {
        let at = segments.checked_add(at)?;
        end = end.max(of(at.checked_add(0x08)?, 8)?.checked_add(of(at.checked_add(0x20)?, 8)?)?);
    }
    for at in (0..section_count).map(|i| i * section_bytes) {
        let at = sections.checked_add(at)?;
        if of(at.checked_add(0x04)?, 4)? != NO_BITS {
            let [from, bytes] = [of(at.checked_add(0x18)?, 8)?, of(at.checked_add(0x20)?, 8)?];
            end = end.max(from.checked_add(bytes)?);
        }
    }
    Some(end)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A file of one section that holds `code`, the section's header behind it.
    pub(crate) fn holding(code: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..6].copy_from_slice(&MAGIC);
        file[0x28..0x30].copy_from_slice(&(64 + code.len() as u64).to_le_bytes());
        file[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
        file[0x3c..0x3e].copy_from_slice(&1u16.to_le_bytes());
        file.extend(code);
        let mut section = [0; 64];
        section[0x04] = 1;
        section[0x18..0x20].copy_from_slice(&64u64.to_le_bytes());
        section[0x20..0x28].copy_from_slice(&(code.len() as u64).to_le_bytes());
        file.extend(section);
        file
    }

    #[test]
    fn a_cut_anywhere_is_seen() {
        let file = holding(b"machine code");
        assert!(is_whole(&file));
        for end in 0..file.len() {
            assert!(!is_whole(&file[..end]), "{end} bytes of {}", file.len());
        }
        let mut zeros = file.clone();
        zeros[32..].fill(0);
        assert!(!is_whole(&zeros) && !is_whole(b"<html>") && !is_whole(b"\x7fELF"));
    }

    /// No number in a header can make it read behind the end, or add up to less than it is.
    #[test]
    fn absurd_headers_are_not_whole() {
        let file = holding(b"machine code");
        let section = file.len() - 64;
        for at in [0x20, 0x28, section + 0x18, section + 0x20] {
            let mut file = file.clone();
            file[at..at + 8].fill(0xff);
            assert!(!is_whole(&file), "at {at}");
        }
        for at in [0x38, 0x3a, 0x3c] {
            let mut file = file.clone();
            file[0x36] = 56;
            file[at..at + 2].fill(0xff);
            assert!(!is_whole(&file), "at {at}");
        }
    }

    /// Memory that is made when a file is loaded takes no bytes of it.
    #[test]
    fn sections_without_bits_take_no_bytes() {
        let mut file = holding(b"machine code");
        let section = file.len() - 64;
        file[section + 0x20..section + 0x28].copy_from_slice(&(1u64 << 40).to_le_bytes());
        assert!(!is_whole(&file));
        file[section + 0x04] = NO_BITS as u8;
        assert!(is_whole(&file));
    }
}
