//! Compiled kernels on disk, under names that change with everything that can change the code.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::driver::cubin;

/// FNV-1a over 128 bits (Fowler, Noll and Vo), each part preceded by its length. Names files; guards
/// against no adversary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Digest(u128);

impl Default for Digest {
    fn default() -> Self {
        Digest(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Digest {
    pub(super) fn add(&mut self, part: &[u8]) {
        let len = (part.len() as u64).to_le_bytes();
        for &byte in len.iter().chain(part) {
            self.0 =
                (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The file of a unit: `stem` names all but the compiler.
pub(super) fn file_name(stem: &str, (major, minor): (i32, i32)) -> String {
    format!("{stem}.nvrtc-{major}.{minor}.cubin")
}

/// A folder of compiled kernels; without one, nothing is found and nothing is kept.
#[derive(Debug)]
pub(super) struct Cache {
    folder: Option<PathBuf>,
    /// A folder that cannot be written is worth one warning, not one for each kernel.
    warned: AtomicBool,
}

impl Cache {
    pub(super) fn new(folder: Option<&Path>) -> Self {
        Cache { folder: folder.map(Path::to_owned), warned: AtomicBool::new(false) }
    }

    /// The unit's machine code, made by the compiler of `version`, or, where there is none to ask, by
    /// the newest that left it whole.
    pub(super) fn read(&self, stem: &str, version: Option<(i32, i32)>) -> Option<Vec<u8>> {
        let folder = self.folder.as_deref()?;
        match version {
            Some(version) => whole(&folder.join(file_name(stem, version))),
            None => newest_first(folder, stem).iter().find_map(|path| whole(path)),
        }
    }

    /// Keeps machine code: written aside, then renamed, so that no reader sees half of it.
    pub(super) fn write(&self, name: &str, code: &[u8]) {
        let Some(folder) = self.folder.as_deref() else {
            return self
                .warn("no cache folder is known: neither HOME nor AMPHORA_KERNEL_CACHE is set");
        };
        // Processes and threads may keep the same code at once, each aside by a name of its own.
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let write = WRITES.fetch_add(1, Ordering::Relaxed);
        let aside = folder.join(format!(".{name}.{}.{write}", std::process::id()));
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&aside, code))
            .and_then(|()| fs::rename(&aside, folder.join(name)));
        if let Err(error) = written {
            let _ = fs::remove_file(&aside);
            self.warn(&format!("{}: {error}", folder.display()));
        }
    }

    fn warn(&self, why: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "compiled kernels are not kept, so the next start compiles again: {why}"
            );
        }
    }
}

/// A file's machine code. Files are renamed into place whole, but folders are copied too, and disks fill.
fn whole(path: &Path) -> Option<Vec<u8>> {
    let code = fs::read(path).ok()?;
    if !cubin::is_whole(&code) {
        tracing::warn!("{}: no whole kernel, and so not used", path.display());
        return None;
    }
    Some(code)
}

/// The files of `stem`, the newest compiler's first.
fn newest_first(folder: &Path, stem: &str) -> Vec<PathBuf> {
    let prefix = format!("{stem}.nvrtc-");
    let version = |name: &str| -> Option<(i32, i32)> {
        let rest = name.strip_prefix(&prefix)?.strip_suffix(".cubin")?;
        let (major, minor) = rest.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut versions: Vec<_> =
        entries.filter_map(|entry| version(&entry.file_name().to_string_lossy())).collect();
    versions.sort_by_key(|&version| std::cmp::Reverse(version));
    versions.into_iter().map(|version| folder.join(file_name(stem, version))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::cubin::tests::holding;

    #[test]
    fn digests_tell_parts_apart() {
        let of = |parts: &[&str]| {
            let mut digest = Digest::default();
            parts.iter().for_each(|part| digest.add(part.as_bytes()));
            digest.to_string()
        };
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_ne!(of(&["a"]), of(&["a", ""]));
        assert_eq!(of(&["a", "b"]), of(&["a", "b"]));
    }

    #[test]
    fn the_newest_compiler_s_code_is_taken_where_none_is_asked() {
        let folder = std::env::temp_dir().join(format!("amphora-cache-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let cache = Cache::new(Some(&folder));
        cache.write(&file_name("unit", (13, 5)), &holding(b"old"));
        cache.write(&file_name("unit", (13, 10)), &holding(b"new"));
        cache.write(&file_name("broken", (13, 10)), b"<html>");
        assert_eq!(cache.read("unit", None), Some(holding(b"new")));
        assert_eq!(cache.read("unit", Some((13, 5))), Some(holding(b"old")));
        assert_eq!(cache.read("unit", Some((13, 0))), None);
        assert_eq!(cache.read("broken", None), None);
        assert_eq!(fs::read_dir(&folder).expect("it was made").count(), 3, "nothing is left aside");
        fs::remove_dir_all(&folder).expect("it was made above");
    }

    /// A file that was cut after it had its name is compiled anew and written over; so is one of nothing.
    #[test]
    fn a_cut_file_is_not_used_and_is_written_over() {
        let folder = std::env::temp_dir().join(format!("amphora-cut-{}", std::process::id()));
        let cache = Cache::new(Some(&folder));
        let (name, code) = (file_name("unit", (13, 0)), holding(b"code"));
        for cut in [0, 4, 40, code.len() - 1] {
            cache.write(&name, &code);
            fs::write(folder.join(&name), &code[..cut]).expect("the folder can be written");
            for version in [Some((13, 0)), None] {
                assert_eq!(cache.read("unit", version), None, "{cut} bytes");
            }
            cache.write(&name, &code);
            assert_eq!(cache.read("unit", None).as_ref(), Some(&code));
        }
        // Where no compiler can be asked, an older one's whole code is better than none.
        cache.write(&file_name("unit", (13, 1)), &code[..40]);
        assert_eq!(cache.read("unit", None).as_ref(), Some(&code));
        assert_eq!(cache.read("unit", Some((13, 1))), None);
        fs::remove_dir_all(&folder).expect("it was made above");
    }

    /// What each of ten processes does at once, whose folder the environment names.
    #[test]
    #[ignore = "ten_processes_at_once_leave_whole_files runs it"]
    fn a_writer_of_ten() {
        let folder = std::env::var(FOLDER).expect("it is run with a folder");
        let (cache, name) = (Cache::new(Some(folder.as_ref())), file_name("unit", (13, 0)));
        let code = |writer: u8| holding(&vec![writer; 1 << 16]);
        for round in 0..20 {
            cache.write(&name, &code(std::process::id() as u8 ^ round));
            let read = cache.read("unit", Some((13, 0))).expect("somebody wrote it");
            assert_eq!(read, code(read[64]), "one writer's bytes, all of them");
        }
    }

    /// Names the folder to a process of [`a_writer_of_ten`].
    const FOLDER: &str = "AMPHORA_TEST_CACHE_FOLDER";

    #[test]
    fn ten_processes_at_once_leave_whole_files() {
        let folder = std::env::temp_dir().join(format!("amphora-race-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let start = || {
            std::process::Command::new(std::env::current_exe().expect("this test's"))
                .args(["--exact", "jit::cache::tests::a_writer_of_ten", "--ignored"])
                .env(FOLDER, &folder)
                .stdout(std::process::Stdio::piped())
                .spawn()
                .expect("it can be run")
        };
        let processes: Vec<_> = (0..10).map(|_| start()).collect();
        for process in processes {
            let ended = process.wait_with_output().expect("it ends");
            let out = String::from_utf8_lossy(&ended.stdout);
            assert!(ended.status.success() && out.contains("1 passed"), "{out}");
        }
        assert_eq!(fs::read_dir(&folder).expect("it was made").count(), 1, "nothing is left aside");
        fs::remove_dir_all(&folder).expect("it was made above");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_one_warning() {
        let file = std::env::temp_dir().join(format!("amphora-no-folder-{}", std::process::id()));
        fs::write(&file, b"a file").expect("the temporary folder can be written");
        for folder in [Some(file.as_path()), None] {
            let cache = Cache::new(folder);
            cache.write("unit", &holding(b"code"));
            assert_eq!(cache.read("unit", None), None);
            assert!(cache.warned.load(Ordering::Relaxed));
        }
        fs::remove_file(&file).expect("it was made above");
    }
}
