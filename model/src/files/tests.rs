//! Folders whole, sharded and damaged.

use super::*;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder left behind in the temporary place harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn folder(label: &str, files: &[(&str, &[u8])]) -> Folder {
    let path = std::env::temp_dir().join(format!("amphora-files-{label}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a temporary folder");
    for (name, bytes) in files {
        std::fs::write(path.join(name), bytes).expect("written");
    }
    Folder(path)
}

/// A file with one U8 tensor of two elements for each name.
fn shard(names: &[&str]) -> Vec<u8> {
    let entries: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            let (from, to) = (2 * i, 2 * i + 2);
            format!(r#""{name}":{{"dtype":"U8","shape":[2],"data_offsets":[{from},{to}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..2 * names.len()).map(|i| i as u8));
    file
}

fn index(map: &str) -> Vec<u8> {
    format!(r#"{{"weight_map": {map}}}"#).into_bytes()
}

#[test]
fn shards_are_one_set_of_tensors() {
    let folder = folder(
        "shards",
        &[
            ("model-1.safetensors", &shard(&["a"])),
            ("model-2.safetensors", &shard(&["b", "c"])),
            // Another format of the same model, which is not ours to read.
            ("consolidated.safetensors", b"any"),
            (
                INDEX,
                &index(
                    r#"{"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-2.safetensors"}"#,
                ),
            ),
        ],
    );
    let files = ModelFiles::open(&folder.0).expect("sound");
    assert_eq!(files.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    let c = files.tensor("c").expect("there");
    assert_eq!((c.dtype, c.shape, c.bytes), (Dtype::U8, &[2][..], &[2, 3][..]));
    assert!(files.tensor("d").is_none());
    assert_eq!(files.tensor_bytes(), 6);
}

#[test]
fn embedded_files_are_read_like_a_folder() {
    let model: &'static [u8] = shard(&["a"]).leak();
    let files: &'static [EmbeddedFile] =
        vec![(SINGLE, model), ("config.json", b"{}" as &[u8])].leak();
    let files = ModelFiles::embedded("demo", files).expect("sound");
    assert_eq!(files.tensor("a").expect("there").bytes, [0, 1]);
    assert_eq!(files.config().expect("there"), "{}");
    let missing = files.tokenizer().expect_err("absent").to_string();
    assert!(missing.starts_with("demo/tokenizer.json: not found"), "{missing}");
}

#[test]
fn broken_folders_are_told_apart() {
    let sound = shard(&["a", "b"]);
    let missing = index(r#"{"a":"other.safetensors"}"#);
    let absent = index(r#"{"z":"model.safetensors"}"#);
    let outside = index(r#"{"a":"../model.safetensors"}"#);
    let twice = index(r#"{"a":"model-1-of-2.safetensors","c":"model-2-of-2.safetensors"}"#);
    let partly = index(r#"{"a":"model-1-of-2.safetensors"}"#);
    let third = shard(&["c"]);
    let mut huge = sound.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    type Case<'a> = (&'a str, &'a [(&'a str, &'a [u8])], &'a str);
    let cases: &[Case<'_>] = &[
        ("none", &[("config.json", b"{}")], "model.safetensors: not found"),
        ("cut", &[(SINGLE, &sound[..sound.len() - 1])], "cut short"),
        ("header", &[(SINGLE, &sound[..40])], "cut short or not safetensors"),
        ("huge", &[(SINGLE, &huge)], "expected at most 100 MB"),
        ("empty", &[(SINGLE, b"")], "0 bytes"),
        ("missing", &[(INDEX, &missing)], "names shard `other.safetensors` (for tensor `a`)"),
        (
            "absent",
            &[(SINGLE, &sound), (INDEX, &absent)],
            "places tensor `z` in `model.safetensors`, which does not have it",
        ),
        (
            "twice",
            &[
                ("model-1-of-2.safetensors", &shard(&["a"])),
                ("model-2-of-2.safetensors", &shard(&["a", "c"])),
                (INDEX, &twice),
            ],
            "model-2-of-2.safetensors: tensor `a` is in another shard too",
        ),
        (
            "unplaced",
            &[("model-1-of-2.safetensors", &sound), (INDEX, &partly)],
            "does not place tensor `b`, which is in `model-1-of-2.safetensors`",
        ),
        (
            "surplus",
            &[
                ("model-1-of-2.safetensors", &shard(&["a"])),
                ("model-2-of-2.safetensors", &third),
                (INDEX, &partly),
            ],
            "does not name shard `model-2-of-2.safetensors`, which is in the folder",
        ),
        ("outside", &[(SINGLE, &sound), (INDEX, &outside)], "expected a file name"),
        ("index", &[(INDEX, b"{}")], "`weight_map` is missing"),
    ];
    for (label, files, expected) in cases {
        let folder = folder(label, files);
        let message = ModelFiles::open(&folder.0).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
    assert!(ModelFiles::open(Path::new("/nowhere/at/all")).is_err());
}

#[test]
fn the_chat_template_is_found_in_either_place() {
    let model = shard(&["a"]);
    let template = |label: &str, extra: &[(&str, &[u8])]| {
        let all = [&[(SINGLE, &model[..])], extra].concat();
        let folder = folder(label, &all);
        ModelFiles::open(&folder.0).expect("sound").chat_template()
    };
    let config = "tokenizer_config.json";
    assert_eq!(template("t0", &[]).expect("sound"), None);
    let found = template("t1", &[("chat_template.jinja", b"J"), (config, b"{}")]);
    assert_eq!(found.expect("sound").as_deref(), Some("J"));
    let found = template("t2", &[(config, br#"{"chat_template": "S"}"#)]);
    assert_eq!(found.expect("sound").as_deref(), Some("S"));
    let named = br#"{"chat_template": [{"name": "tool", "template": "T"},
        {"name": "default", "template": "D"}]}"#;
    let found = template("t3", &[(config, named)]);
    assert_eq!(found.expect("sound").as_deref(), Some("D"));
    for (label, text) in
        [("t4", &br#"{"chat_template": 3}"#[..]), ("t5", br#"{"chat_template": []}"#)]
    {
        assert!(template(label, &[(config, text)]).is_err());
    }
}
