//! HTTP: routes, limits and shutdown.

mod admin;
mod answer;
mod metrics;
mod speaker;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use amphora_engine::EngineHandle;
use anyhow::Context;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, oneshot};

use crate::openai::{
    ApiError, ChatRequest, CompletionRequest, Envelope, Kind, Model, ModelList, Prompt, Shared,
};
use crate::service::{Ask, Service};
use crate::text::TextError;

pub use admin::AdapterRoot;
use answer::Prompted;

/// Most bytes of a request: far above any context, far below what would hurt.
const MAX_BODY_BYTES: usize = 32 << 20;

/// Most prompts of one completion request; each takes a place in the engine's queue.
const MAX_PROMPTS: usize = 256;

/// How long connections may stay open in a shutdown once nothing runs any more.
const LINGER: Duration = Duration::from_secs(5);

/// What handlers share.
struct App {
    service: Service,
    /// Start of the server, seconds since 1970.
    created: u64,
    /// Makes ids unique; they also carry the time of the start.
    answers: AtomicU64,
    /// Where clients may load adapters from; `None`: nowhere.
    adapter_root: Option<AdapterRoot>,
    /// Held while the set of adapters changes.
    changing: Arc<Mutex<()>>,
    /// Places for requests not answered yet.
    places: Places,
}

/// Places for requests, as many as the operator allows.
struct Places {
    free: Arc<Semaphore>,
    total: usize,
}

/// How to serve.
#[derive(Debug)]
pub struct Options<'a> {
    /// Host and port.
    pub address: (&'a str, u16),
    /// Where clients may load adapters from.
    pub adapter_root: Option<AdapterRoot>,
    /// Most requests taken and not answered yet.
    pub max_requests: usize,
}

/// Serves until SIGINT or SIGTERM or until `engine_ended`, then lets running requests finish.
/// `bound` is told the address.
pub async fn serve(
    service: Service,
    options: Options<'_>,
    engine_ended: oneshot::Receiver<()>,
    bound: impl FnOnce(SocketAddr),
) -> anyhow::Result<()> {
    let address = options.address;
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {}:{}", address.0, address.1))?;
    // Handlers are in place before the address is printed: a first signal is never missed.
    let signal = shutdown_signal()?;
    let (begun, stopping) = oneshot::channel();
    let shutdown = async {
        tokio::select! {
            () = signal => {}
            _ = engine_ended => {}
        }
        // Nobody waits for this once the last connection is closed.
        let _ = begun.send(());
    };
    bound(listener.local_addr()?);
    let engine = service.engine.clone();
    let served = axum::serve(listener, router(service, options)).with_graceful_shutdown(shutdown);
    tokio::select! {
        result = served.into_future() => result?,
        () = abandoned(&engine, stopping) => {}
    }
    Ok(())
}

/// Resolves when the shutdown has begun and nothing has run for [`LINGER`]: a client that has sent
/// half a request, or reads no answer, does not keep the server up.
async fn abandoned(engine: &EngineHandle, stopping: oneshot::Receiver<()>) {
    const POLL: Duration = Duration::from_millis(100);
    if stopping.await.is_err() {
        return std::future::pending().await; // The server ended by itself.
    }
    let mut quiet = Duration::ZERO;
    while quiet < LINGER {
        tokio::time::sleep(POLL).await;
        let metrics = engine.metrics();
        quiet = if metrics.running + metrics.waiting == 0 { quiet + POLL } else { Duration::ZERO };
    }
}

/// Resolves at the first SIGINT or SIGTERM; at the second the process ends at once.
fn shutdown_signal() -> anyhow::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        let mut next = async move || {
            tokio::select! {
                _ = interrupt.recv() => 130,
                _ = terminate.recv() => 143,
            }
        };
        next().await;
        eprintln!("shutting down: finishing the requests that run; a second signal ends at once");
        tokio::spawn(async move {
            let code = next().await;
            std::process::exit(code);
        });
    })
}

fn router(service: Service, options: Options<'_>) -> Router {
    let total = options.max_requests.min(Semaphore::MAX_PERMITS);
    let app = App {
        service,
        created: now(),
        answers: AtomicU64::new(0),
        adapter_root: options.adapter_root,
        changing: Arc::default(),
        places: Places { free: Arc::new(Semaphore::new(total)), total },
    };
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/load_lora_adapter", post(admin::load))
        .route("/v1/unload_lora_adapter", post(admin::unload))
        .route("/metrics", get(metrics::metrics))
        .fallback(async || ApiError::status(StatusCode::NOT_FOUND, "no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::status(StatusCode::METHOD_NOT_ALLOWED, "this route has another method")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(Arc::new(app))
}

async fn health() -> Json<serde_json::Value> {
    Json(json!({"status": "ok"}))
}

async fn models(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: app.models() })
}

async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(name) =
        name.map_err(|rejection| ApiError::status(rejection.status(), rejection.body_text()))?;
    let found = app.models().into_iter().find(|model| model.id == name);
    found.map(Json).ok_or_else(|| ApiError::unknown_model(&name))
}

async fn chat(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let ChatRequest { shared, messages } = ChatRequest::parse(&read(body)?)?;
    let adapter = app.service.adapter(shared.model.as_deref())?;
    let service = app.service.clone();
    let prompt = encoding(move || {
        service.chat_prompt(&messages).map_err(|error| text_error("messages", &error))
    })
    .await?;
    let ask = Ask { kind: Kind::Chat, prompt, adapter, sampling: shared.sampling.clone() };
    answer::answer(
        &app,
        app.envelope(Kind::Chat, &shared),
        &shared,
        vec![Prompted { ask, echo: None }],
    )
    .await
}

async fn completion(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let CompletionRequest { shared, prompts, echo } = CompletionRequest::parse(&read(body)?)?;
    let adapter = app.service.adapter(shared.model.as_deref())?;
    if prompts.len() > MAX_PROMPTS {
        let message =
            format!("'prompt' has {} prompts; at most {MAX_PROMPTS} are taken", prompts.len());
        return Err(ApiError::invalid("prompt", message));
    }
    let (service, mut sampling) = (app.service.clone(), shared.sampling.clone());
    if echo {
        // An echoed prompt has log-probabilities where the answer has.
        sampling.prompt_logprobs = sampling.prompt_logprobs.max(sampling.logprobs);
    }
    let prompts = encoding(move || {
        let prompted = |prompt| {
            let (tokens, text) = match prompt {
                Prompt::Tokens(tokens) => {
                    let text = echo.then(|| service.text.decode(&tokens));
                    (tokens, text)
                }
                Prompt::Text(text) => {
                    let tokens = service
                        .plain_prompt(&text)
                        .map_err(|error| text_error("prompt", &error))?;
                    (tokens, echo.then_some(text))
                }
            };
            let (adapter, sampling) = (adapter.clone(), sampling.clone());
            let ask = Ask { kind: Kind::Completion, prompt: tokens, adapter, sampling };
            Ok(Prompted { ask, echo: text })
        };
        prompts.into_iter().map(prompted).collect::<Result<Vec<_>, ApiError>>()
    })
    .await?;
    answer::answer(&app, app.envelope(Kind::Completion, &shared), &shared, prompts).await
}

impl App {
    /// The base first, then its adapters.
    fn models(&self) -> Vec<Model> {
        let base = Model { parent: None, ..self.model_of(&self.service.base) };
        let adapters = self.service.adapters();
        std::iter::once(base).chain(adapters.iter().map(|name| self.model_of(name))).collect()
    }

    /// The entry of an adapter.
    fn model_of(&self, name: &str) -> Model {
        Model {
            id: name.to_owned(),
            object: "model",
            created: self.created,
            owned_by: "amphora",
            parent: Some(self.service.base.to_string()),
            max_model_len: self.service.max_model_len,
        }
    }

    fn envelope(&self, kind: Kind, shared: &Shared) -> Envelope {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        let number = self.answers.fetch_add(1, Ordering::Relaxed);
        Envelope {
            kind,
            id: format!("{prefix}-{:x}-{number:x}", self.created),
            created: now(),
            model: shared.model.clone().unwrap_or_else(|| self.service.base.to_string()),
        }
    }
}

fn read(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body is larger than {MAX_BODY_BYTES} bytes");
            ApiError::status(StatusCode::PAYLOAD_TOO_LARGE, message)
        }
        status => ApiError::status(status, rejection.body_text()),
    })
}

impl Places {
    /// Takes a place for each of `count` requests, until the permit is dropped.
    fn take(&self, count: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let busy = || {
            let message = format!(
                "{count} more would be above the {} requests that are taken at a time; come again",
                self.total
            );
            ApiError::status(StatusCode::TOO_MANY_REQUESTS, message)
        };
        let wanted = u32::try_from(count).map_err(|_| busy())?;
        self.free.clone().try_acquire_many_owned(wanted).map_err(|_| busy())
    }
}

/// Makes tokens on a thread for it: a long prompt takes seconds, and the threads that serve
/// connections are few.
async fn encoding<T: Send + 'static>(
    make: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(make).await.unwrap_or_else(|error| {
        let message = format!("the prompt could not be encoded: {error}");
        Err(ApiError::status(StatusCode::INTERNAL_SERVER_ERROR, message))
    })
}

fn text_error(param: &str, error: &TextError) -> ApiError {
    match error {
        TextError::TooLong { .. } => ApiError::too_long(param, error.to_string()),
        _ => ApiError::invalid(param, error.to_string()),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        (self.status, [(header::CONTENT_TYPE, json)], self.body().to_string()).into_response()
    }
}
