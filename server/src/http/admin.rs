//! Adapters that come and go while it serves: `POST /v1/load_lora_adapter` and
//! `POST /v1/unload_lora_adapter`, with the fields that other servers have (`lora_name`, `lora_path`,
//! `load_inplace`).
//!
//! Whoever may load an adapter makes the server read files, so this is off unless the operator names a
//! folder with `--adapter-root`, and no file outside it is ever read. A refused adapter changes
//! nothing: what was loaded under its name goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use amphora_engine::{LoadError, UnloadError};
use amphora_model::adapter::ADAPTER_FILES;
use amphora_model::source::Source;
use anyhow::Context;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use tokio::sync::Mutex;

use super::{App, encoding, read};
use crate::console::Voice;
use crate::openai::{ApiError, Fields, Model};

/// The only folder from which clients may load adapters.
#[derive(Debug)]
pub struct AdapterRoot {
    /// Resolved: absolute and without links.
    folder: PathBuf,
}

impl AdapterRoot {
    /// # Errors
    /// There is no such folder.
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        let resolved = folder.canonicalize();
        let folder = resolved.with_context(|| format!("--adapter-root {}", folder.display()))?;
        anyhow::ensure!(folder.is_dir(), "--adapter-root {}: not a folder", folder.display());
        Ok(Self { folder })
    }

    /// The folder that a client means, which lies inside this one once links are followed.
    fn resolve(&self, path: &str) -> Result<PathBuf, ApiError> {
        let refuse = |why: &str| {
            let message = format!(
                "'lora_path' {path:?} {why}; expected an adapter's folder inside the server's \
                 adapter root, absolute or relative to it"
            );
            ApiError::invalid("lora_path", message)
        };
        // What lies outside and what is not there get one answer: nobody learns what else exists.
        let folder = match self.folder.join(path).canonicalize() {
            Ok(found) if found.starts_with(&self.folder) && found.is_dir() => found,
            _ => return Err(refuse("names no folder there")),
        };
        // A file may be a link too, as in caches that keep files by their digest. One that is not there is
        // refused by whoever reads it.
        let leaves = |file: &&&str| {
            let resolved = folder.join(file).canonicalize();
            resolved.is_ok_and(|file| !file.starts_with(&self.folder))
        };
        match ADAPTER_FILES.iter().find(leaves) {
            Some(file) => Err(refuse(&format!("has a link out of the adapter root ({file})"))),
            None => Ok(folder),
        }
    }
}

/// A body of `/v1/load_lora_adapter`.
struct Load {
    name: String,
    path: String,
    /// Whether an adapter of this name may be replaced.
    in_place: bool,
}

impl Load {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let load = Self {
            name: need(&mut fields, "lora_name")?,
            path: need(&mut fields, "lora_path")?,
            in_place: fields.boolean("load_inplace")?.unwrap_or(false),
        };
        fields.finish("")?;
        Ok(load)
    }
}

fn need(fields: &mut Fields, name: &'static str) -> Result<String, ApiError> {
    match fields.text(name)? {
        Some(text) if !text.is_empty() => Ok(text),
        Some(_) => Err(ApiError::invalid(name, format!("'{name}' is empty"))),
        None => Err(ApiError::invalid(name, format!("'{name}' is missing"))),
    }
}

/// Reads, checks and packs an adapter; answers once requests can name it.
pub async fn load(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Model>, ApiError> {
    let root = app.adapter_root.as_ref().ok_or_else(off)?;
    let Load { name, path, in_place } = Load::parse(&read(body)?)?;
    if name == *app.service.base {
        let message = format!("'lora_name' {name:?} is the base model's name");
        return Err(ApiError::invalid("lora_name", message));
    }
    let folder = root.resolve(&path)?;
    let engine = app.service.engine.clone();
    let named = name.clone();
    alone(&app.changing, move || {
        if !in_place && engine.has_adapter(&named) {
            let message =
                format!("adapter '{named}' is loaded; send 'load_inplace': true to replace it");
            return Err(ApiError::invalid("lora_name", message));
        }
        let loaded = engine.load_adapter(&named, &Source::Folder(folder));
        for note in loaded.map_err(|error| refused(&error))?.notes {
            // An operator who closed standard error does not want to know.
            let _ = Voice::Err.line(format_args!("adapter '{named}': {note}"));
        }
        // Only then do lists and names know of it.
        engine.settle();
        Ok(())
    })
    .await?;
    Ok(Json(app.model_of(&name)))
}

/// Takes an adapter out of the names at once; requests that have it are answered.
pub async fn unload(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<serde_json::Value>, ApiError> {
    if app.adapter_root.is_none() {
        return Err(off());
    }
    let mut fields = Fields::parse(&read(body)?)?;
    let name = need(&mut fields, "lora_name")?;
    // A number that some clients send beside the name; names are enough here.
    fields.ignore(&["lora_int_id"]);
    fields.finish("")?;
    let engine = app.service.engine.clone();
    let named = name.clone();
    alone(&app.changing, move || {
        let unloaded = engine.unload_adapter(&named);
        engine.settle();
        unloaded.map_err(|error| match error {
            UnloadError::Unknown(name) => ApiError::unknown_model(&name),
            UnloadError::Stopped => {
                ApiError::status(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
        })
    })
    .await?;
    Ok(Json(serde_json::json!({"id": name, "object": "model", "deleted": true})))
}

/// Changes the set of adapters, one change at a time, so that "is it loaded" and "load it" are one step. It
/// stays one when its client goes away meanwhile: the change goes on, and so does its turn.
async fn alone<T: Send + 'static>(
    changing: &Arc<Mutex<()>>,
    change: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = changing.clone().lock_owned().await;
    encoding(move || {
        let _turn = turn;
        change()
    })
    .await
}

fn off() -> ApiError {
    ApiError::status(
        StatusCode::FORBIDDEN,
        "this server takes no adapters over HTTP; it was started without --adapter-root",
    )
}

fn refused(error: &LoadError) -> ApiError {
    match error {
        LoadError::Stopped => ApiError::status(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        LoadError::Name(error) => ApiError::invalid("lora_name", error.to_string()),
        _ => ApiError::invalid("lora_path", error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside_the_root() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = AdapterRoot::open(&here.join("src")).expect("the sources");
        assert_eq!(root.resolve("http").expect("inside"), root.folder.join("http"));
        assert_eq!(root.resolve("./http/../text").expect("inside"), root.folder.join("text"));
        let absolute = root.folder.join("http").display().to_string();
        assert!(root.resolve(&absolute).is_ok());
        for outside in
            ["..", "../src/../..", "/", "/etc", "ghost", "main.rs", "http/../../src/../tests"]
        {
            let error = root.resolve(outside).expect_err(outside);
            assert_eq!(error.param.as_deref(), Some("lora_path"));
        }
        assert!(AdapterRoot::open(&here.join("ghost")).is_err());
        assert!(AdapterRoot::open(&here.join("Cargo.toml")).is_err());
    }

    #[test]
    fn links_lead_nowhere_outside_the_root() {
        use std::os::unix::fs::symlink;
        let base = std::env::temp_dir().join(format!("amphora-links-{}", std::process::id()));
        let (root, outside) = (base.join("root"), base.join("outside"));
        for folder in ["inside", "blobs", "leaving", "half"] {
            std::fs::create_dir_all(root.join(folder)).expect("a folder of our own");
        }
        std::fs::create_dir_all(&outside).expect("a folder of our own");
        for file in [root.join("blobs/1"), outside.join("adapter_config.json")] {
            std::fs::write(file, "{}").expect("a file of our own");
        }
        let link = |to: PathBuf, at: &str| symlink(to, root.join(at)).expect("a link of our own");
        link(root.join("blobs/1"), "inside/adapter_config.json");
        link(outside.join("adapter_config.json"), "leaving/adapter_config.json");
        link(outside.join("adapter_config.json"), "half/adapter_model.safetensors");
        link(outside.clone(), "out");
        let root = AdapterRoot::open(&root).expect("it is there");
        let resolved =
            ["inside", "leaving", "half", "out"].map(|folder| root.resolve(folder).is_ok());
        std::fs::remove_dir_all(&base).expect("our own");
        assert_eq!(resolved, [true, false, false, false]);
    }

    #[tokio::test]
    async fn a_change_whose_client_went_away_still_has_its_turn() {
        let changing = Arc::new(Mutex::new(()));
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = tokio::sync::oneshot::channel();
        let change = move || {
            begin.send(()).expect("the test waits");
            ended.recv().expect("the test says when");
            Ok(())
        };
        let theirs = changing.clone();
        let client = tokio::spawn(async move { alone(&theirs, change).await });
        begun.await.expect("it begins");
        client.abort();
        assert!(client.await.is_err(), "nobody waits any more");
        assert!(changing.try_lock().is_err(), "another change came in between");
        end.send(()).expect("it still runs");
        drop(changing.lock().await);
    }

    #[test]
    fn bodies_are_read_strictly() {
        let load = |text: &str| Load::parse(text.as_bytes());
        let good = load(r#"{"lora_name": "a/b", "lora_path": "x", "load_inplace": true}"#);
        assert!(good.is_ok_and(|load| load.name == "a/b" && load.in_place));
        for (text, param) in [
            (r#"{"lora_path": "x"}"#, "lora_name"),
            (r#"{"lora_name": "", "lora_path": "x"}"#, "lora_name"),
            (r#"{"lora_name": "a"}"#, "lora_path"),
            (r#"{"lora_name": "a", "lora_path": 1}"#, "lora_path"),
            (r#"{"lora_name": "a", "lora_path": "x", "rank": 1}"#, "rank"),
        ] {
            let error = load(text).err().expect(text);
            assert_eq!(error.param.as_deref(), Some(param), "{text}");
        }
    }
}
