//! First inputs of the targets, made of `tests/golden` before each run rather than stored twice. A
//! target without any starts from nothing.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Larger files are slow to mutate and say nothing that a smaller one does not.
const MOST_BYTES: usize = 48 << 10;

/// Writes the seeds of `target` into `folder`, in place of what was there.
pub fn write(root: &Path, target: &str, folder: &Path) -> Result<()> {
    if folder.is_dir() {
        std::fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for (number, bytes) in seeds(&root.join("tests/golden"), target)?.iter().enumerate() {
        if bytes.len() <= MOST_BYTES {
            let file = folder.join(format!("{number:03}"));
            std::fs::write(&file, bytes).with_context(|| file.display().to_string())?;
        }
    }
    Ok(())
}

fn seeds(golden: &Path, target: &str) -> Result<Vec<Vec<u8>>> {
    match target {
        // Adapters' files, since those of models are large; the format is the same.
        "safetensors_header" => files(&adapters(golden)?, "adapter_model.safetensors"),
        "adapter_config" => files(&adapters(golden)?, "adapter_config.json"),
        "adapter_folder" => adapters(golden)?.iter().map(|folder| both(folder)).collect(),
        "model_config" => {
            let models = folders(&golden.join("models"))?;
            let mut configs = files(&models, "config.json")?;
            for (config, generation) in
                configs.iter_mut().zip(files(&models, "generation_config.json")?)
            {
                config.push(0);
                config.extend(generation);
            }
            Ok(configs)
        }
        "safetensors_index" => Ok(vec![INDEX.as_bytes().to_vec()]),
        "tuned_file" => Ok(TUNED.lines().map(|text| text.as_bytes().to_vec()).collect()),
        "chat_request" => Ok(REQUESTS.iter().map(|body| body.as_bytes().to_vec()).collect()),
        _ => Ok(Vec::new()),
    }
}

/// As that target reads them, one a line; a test beside the parser holds that all are taken.
const TUNED: &str = include_str!("../../../fuzz/fuzz_targets/tuned_file.txt");

/// Over the shards of that target.
const INDEX: &str = r#"{"metadata":{"total_size":6},"weight_map":{"a":"first.safetensors","b":"first.safetensors","c":"second.safetensors"}}"#;

const REQUESTS: &[&str] = &[
    r#"{"model":"base","messages":[{"role":"system","content":"Be short."},{"role":"user","content":[{"type":"text","text":"Hello"}],"name":"a"}],"max_completion_tokens":8,"temperature":0.7,"top_p":0.9,"top_k":-1,"seed":-3,"stop":["\n","END"],"stream":true,"stream_options":{"include_usage":true},"stop_token_ids":[1,2],"ignore_eos":true}"#,
    r#"{"model":"lora","prompt":["one",[1,2,3]],"max_tokens":4,"stop":"x","n":1,"logit_bias":{},"presence_penalty":0,"response_format":{"type":"text"},"user":"u"}"#,
    r#"{"prompt":[5,6,7],"temperature":0,"echo":false,"suffix":null}"#,
    r#"{"prompt":"a","echo":true,"logprobs":1,"max_tokens":0}"#,
];

/// Configuration and weights as `adapter_folder` reads them; a missing file is an empty one.
fn both(folder: &Path) -> Result<Vec<u8>> {
    let read = |file: &str| {
        let file = folder.join(file);
        match file.is_file() {
            true => std::fs::read(&file).with_context(|| file.display().to_string()),
            false => Ok(Vec::new()),
        }
    };
    let config = read("adapter_config.json")?;
    let length = u16::try_from(config.len())
        .with_context(|| format!("{}: a configuration over 64 KiB", folder.display()))?;
    Ok([&length.to_le_bytes()[..], &config, &read("adapter_model.safetensors")?].concat())
}

/// The file of that name in each folder that has it.
fn files(folders: &[PathBuf], name: &str) -> Result<Vec<Vec<u8>>> {
    folders
        .iter()
        .map(|folder| folder.join(name))
        .filter(|file| file.is_file())
        .map(|file| std::fs::read(&file).with_context(|| file.display().to_string()))
        .collect()
}

/// Good adapters of every model, and bad ones.
fn adapters(golden: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for model in folders(&golden.join("adapters"))? {
        found.extend(folders(&model)?);
    }
    found.extend(folders(&golden.join("bad_adapters_gpt_oss"))?);
    found.extend(folders(&golden.join("bad_adapters"))?);
    Ok(found)
}

/// Folders in `folder`, sorted.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree;

    #[test]
    fn targets_that_read_files_have_seeds() {
        let golden = tree::root().join("tests/golden");
        for target in [
            "safetensors_header",
            "safetensors_index",
            "adapter_config",
            "adapter_folder",
            "model_config",
            "chat_request",
            "tuned_file",
        ] {
            let seeds = seeds(&golden, target).expect("stored files are readable");
            assert!(seeds.iter().any(|seed| seed.len() <= MOST_BYTES), "{target}");
        }
    }

    #[test]
    fn both_files_of_an_adapter_are_one_input() {
        let folder = tree::root().join("tests/golden/adapters/gpt_oss/router_r4");
        let seed = both(&folder).expect("a stored adapter");
        let config = std::fs::read(folder.join("adapter_config.json")).expect("stored");
        assert_eq!(seed[..2], (config.len() as u16).to_le_bytes());
        assert_eq!(seed[2..2 + config.len()], config);
    }
}
