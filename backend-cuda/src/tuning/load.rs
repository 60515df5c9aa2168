//! Where a device's choices come from: built in for its GPU, and a folder's files in front of them.

use std::path::{Path, PathBuf};

use amphora_hal::{Error, Result};

use super::{AnyFile, Fault, Limits, Tuning, vllm};

/// Files that are built in, by their names.
const BUILT_IN: &[(&str, &str)] =
    &[("NVIDIA_H200.linear.json", include_str!("../../tuned/NVIDIA_H200.linear.json"))];

/// Choices, and a line on each file of the folder for whoever starts the device.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    /// The choices.
    pub tuning: Tuning,
    /// What became of each file.
    pub notes: Vec<String>,
}

/// A GPU's name in file names.
fn gpu_name(gpu: &str) -> String {
    gpu.replace([' ', '-', '/'], "_")
}

/// The name of the file of one GPU and operator.
pub fn file_name(gpu: &str, operator: &str) -> String {
    format!("{}.{operator}.json", gpu_name(gpu))
}

/// The operator of a file, if its name is one of ours.
fn operator_of(name: &str) -> Option<&'static str> {
    let (_, operator) = name.strip_suffix(".json")?.rsplit_once('.')?;
    AnyFile::NAMES.into_iter().find(|known| *known == operator)
}

/// Reads one of our files.
fn ours(name: &str, text: &str) -> std::result::Result<AnyFile, Fault> {
    let file = AnyFile::parse(text)?;
    let expected = file_name(file.gpu(), file.operator());
    if name != expected {
        let what = format!("its gpu and operator make it {expected}");
        return Err(Fault { field: "file name".to_owned(), what });
    }
    Ok(file)
}

impl Loaded {
    /// The choices of the GPU called `gpu`, from what is built in and from `folder`.
    ///
    /// # Errors
    /// The folder cannot be read, or one of its files is not what it must be, even if it is another
    /// GPU's.
    pub fn new(gpu: &str, limits: Limits, folder: Option<&Path>) -> Result<Self> {
        let mut loaded = Loaded::default();
        for (name, text) in BUILT_IN {
            let broken = |fault: Fault| at(Path::new(name), fault);
            let file = ours(name, text).map_err(broken)?;
            if file.gpu() == gpu {
                file.check_on(limits).map_err(broken)?;
                loaded.tuning.put_first(file);
            }
        }
        let Some(folder) = folder else { return Ok(loaded) };
        let before = loaded.notes.len();
        for path in json_files(folder)? {
            loaded.add(gpu, limits, &path)?;
        }
        if loaded.notes.len() == before {
            loaded.notes.push(format!("{}: no tuning data", folder.display()));
        }
        Ok(loaded)
    }

    fn add(&mut self, gpu: &str, limits: Limits, path: &Path) -> Result<()> {
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let text = std::fs::read_to_string(path)
            .map_err(|error| at(path, Fault::new("file", error.to_string())))?;
        if operator_of(&name).is_some() {
            let file = ours(&name, &text).map_err(|fault| at(path, fault))?;
            if file.gpu() != gpu {
                self.notes
                    .push(format!("{name}: not used: it is for {}, this is {gpu}", file.gpu()));
                return Ok(());
            }
            file.check_on(limits).map_err(|fault| at(path, fault))?;
            self.notes.push(format!("{name}: {} entries", file.entries()));
            self.tuning.put_first(file);
            return Ok(());
        }
        if let Some((kind, other)) = vllm::Kind::of(&name) {
            let answer = vllm::answer(kind, gpu, &text).map_err(|fault| at(path, fault))?;
            if gpu_name(other) != gpu_name(gpu) {
                self.notes.push(format!("{name}: not used: it is for another GPU than {gpu}"));
                return Ok(());
            }
            self.notes.push(format!("{name}: {}", answer.line));
            answer.files.into_iter().for_each(|file| self.tuning.put_last(file));
            return Ok(());
        }
        let operators = AnyFile::NAMES.join(", ");
        let what = format!("expected GPU.OPERATOR.json with an operator of {operators}");
        Err(at(path, Fault::new("file name", what)))
    }
}

fn at(path: &Path, fault: Fault) -> Error {
    Error::Tuning { path: path.to_owned(), field: fault.field, what: fault.what }
}

/// The folder's JSON files by name; others, and folders inside, are not looked at.
fn json_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error: std::io::Error| at(folder, Fault::new("folder", error.to_string()));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_file() && path.extension().is_some_and(|ending| ending == "json") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::Element;
    use super::super::operators::DensePath::Narrow;
    use super::*;

    const H200: Limits = Limits { processors: 132, shared: 227 << 10, overlap: true, groups: true };
    const GPU: &str = "NVIDIA H200";

    /// A folder of a test, gone with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("amphora-{test}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(&path).expect("a temporary folder");
            Folder(path)
        }

        fn put(&self, name: &str, text: &str) -> &Self {
            std::fs::write(self.0.join(name), text).expect("it was just made");
            self
        }

        fn load(&self) -> Result<Loaded> {
            Loaded::new(GPU, H200, Some(&self.0))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn linear(gpu: &str, choice: &str) -> String {
        format!(
            "{{\"gpu\": \"{gpu}\", \"operator\": \"linear\", \"entries\": [\
             {{\"when\": {{\"tokens\": 8}}, \"use\": {choice}}}]}}"
        )
    }

    #[test]
    fn what_is_built_in_is_sound() {
        let loaded = Loaded::new(GPU, H200, None).expect("the files of the repository");
        assert!(loaded.notes.is_empty());
        let router = |tokens| super::super::When {
            tokens: Some(tokens),
            k: Some(2048),
            n: Some(128),
            dtype: Some(Element::Bf16),
            ..Default::default()
        };
        let path = |tokens| loaded.tuning.linear.find(&router(tokens), |choice| Some(choice.path));
        assert_eq!([64, 128, 256, 512].map(path), [None, Some(Narrow), Some(Narrow), None]);
        let other = Loaded::new("NVIDIA A100", H200, None).expect("the files of the repository");
        assert_eq!(other.tuning.linear.find(&router(128), |choice| Some(choice.path)), None);
    }

    #[test]
    fn a_folder_s_files_are_told_and_go_first() {
        let folder = Folder::new("tuned");
        folder
            .put("NVIDIA_H200.linear.json", &linear(GPU, r#"{"path": "narrow", "parts": 3}"#))
            .put("NVIDIA_A100.linear.json", &linear("NVIDIA A100", r#"{"path": "wide"}"#))
            .put("README.md", "not looked at");
        let loaded = folder.load().expect("good files");
        assert_eq!(loaded.notes.len(), 2, "{:?}", loaded.notes);
        assert!(loaded.notes[0].contains("not used"), "{:?}", loaded.notes);
        let call = super::super::When { tokens: Some(9), ..Default::default() };
        assert_eq!(loaded.tuning.linear.find(&call, |choice| choice.parts), Some(3));
    }

    #[test]
    fn another_program_s_files_go_behind_ours() {
        let folder = Folder::new("vllm");
        let tiles = r#"{"8": {"3": {"9": {"2880": {"32": {"split_k": 4, "block_m": 16}}}}}}"#;
        folder.put("NVIDIA_H200_SHRINK.json", tiles);
        let call =
            super::super::When { tokens: Some(9), k: Some(2880), ..super::super::When::default() };
        let parts = |loaded: &Loaded| loaded.tuning.lora_shrink.find(&call, |c| Some(c.parts));
        let loaded = folder.load().expect("recognised");
        assert_eq!(parts(&loaded), Some(4));
        assert!(loaded.notes[0].contains("split_k taken"), "{:?}", loaded.notes);
        // Another GPU's say nothing here, even where its name begins alike, but must be sound.
        let others = Folder::new("vllm-others");
        let experts = r#"{"8": {"BLOCK_SIZE_M": 16}}"#;
        others
            .put("NVIDIA_A100_SHRINK.json", tiles)
            .put("NVIDIA_H200_NVL_SHRINK.json", tiles)
            .put("E=32,N=2880,device_name=NVIDIA_A100,dtype=fp8_w8a8.json", experts);
        let loaded = others.load().expect("recognised");
        assert_eq!(parts(&loaded), None);
        assert_eq!(loaded.notes.len(), 3, "{:?}", loaded.notes);
        for note in &loaded.notes {
            assert!(note.ends_with("not used: it is for another GPU than NVIDIA H200"), "{note}");
        }
        others.put("E=32,N=2880,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", experts);
        let notes = others.load().expect("recognised").notes;
        assert!(notes.iter().any(|note| note.contains("1 tiles")), "{notes:?}");
        others.put("NVIDIA_A100_SHRINK.json", "[]");
        assert!(others.load().is_err());
        let ours = r#"{"gpu": "NVIDIA H200", "operator": "lora_shrink", "entries": [
            {"when": {}, "use": {"parts": 2, "order": "ordered"}}]}"#;
        folder.put("NVIDIA_H200.lora_shrink.json", ours);
        assert_eq!(parts(&folder.load().expect("sound")), Some(2));
    }

    #[test]
    fn what_is_wrong_is_named_with_file_and_field() {
        let refused = |name: &str, text: &str, parts: &[&str]| {
            let folder = Folder::new("refused");
            folder.put(name, text);
            let error = folder.load().expect_err(name).to_string();
            for part in parts {
                assert!(error.contains(part), "{part} in {error}");
            }
            assert!(!error.contains('\n'), "{error}");
        };
        let name = "NVIDIA_H200.linear.json";
        refused(name, &linear(GPU, r#"{"path": "narrow", "stages": 4}"#), &[name, "stages"]);
        refused(name, &linear(GPU, r#"{"path": "narrow", "parts": "4"}"#), &[name, "use.parts"]);
        refused(name, &linear(GPU, r#"{"path": "narrow", "parts": 9}"#), &["use.parts", "1 to 7"]);
        refused(name, &linear(GPU, r#"{"path": "square"}"#), &["use.path", "square"]);
        refused(name, &linear("NVIDIA A100", r#"{"path": "wide"}"#), &["NVIDIA_A100.linear.json"]);
        refused(name, "{", &[name, "EOF"]);
        let route = r#"{"gpu": "NVIDIA H200", "operator": "moe_route", "entries": [
            {"when": {"dtype": "bf16"}, "use": {"path": "sort"}}]}"#;
        refused("NVIDIA_H200.moe_route.json", route, &["when.dtype", "tokens, experts, top_k"]);
        refused("tiles.json", "{}", &["tiles.json", "GPU.OPERATOR.json"]);
        let large = linear(GPU, r#"{"path": "stream"}"#)
            .replace("\"tokens\": 8", "\"tokens\": 16, \"k\": 12288");
        refused(name, &large, &[name, "use.path", "shared memory"]);
        let error = Loaded::new(GPU, H200, Some(Path::new("/no/such"))).expect_err("no folder");
        assert!(error.to_string().contains("/no/such"), "{error}");
    }
}
