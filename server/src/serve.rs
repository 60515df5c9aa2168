//! `serve`: a model and its adapters over HTTP.

use std::net::SocketAddr;
use std::process::ExitCode;

use amphora_engine::Shutdown;
use anyhow::{Context, bail};

use crate::cli::ServeArgs;
use crate::console::Voice;
use crate::http::{self, AdapterRoot};
use crate::service::Service;
use crate::start::{self, Running, Setup};

/// Runs the command until a signal or the engine ends it.
pub fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let adapter_root = args.adapter_root.as_deref().map(AdapterRoot::open).transpose()?;
    let running = start::start(Setup::serve(&args)?, Voice::Out)?;
    for line in &running.report {
        Voice::Out.line(line)?;
    }
    let options = http::Options {
        address: (&args.host, args.port),
        adapter_root,
        max_requests: args.max_requests,
    };
    let announced = running.service.clone();
    let mut told = Ok(());
    serve(running, options, |address| told = announce(address, &announced))?;
    told?;
    Voice::Out.line("stopped")?;
    Ok(ExitCode::SUCCESS)
}

/// Serves what runs until a signal or the engine ends it; `bound` is told the address. An engine that the
/// device has failed is an error.
pub fn serve(
    running: Running,
    options: http::Options<'_>,
    bound: impl FnOnce(SocketAddr),
) -> anyhow::Result<()> {
    let Running { service, thread, .. } = running;
    let engine = service.engine.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // HTTP is light; the cores are the engine's.
        .enable_all()
        .build()
        .context("cannot start the HTTP runtime")?;
    // The thread that waits for the engine tells when it ends, by a signal's shutdown or by a fault.
    let (ended_sender, ended) = tokio::sync::oneshot::channel();
    let waiter = std::thread::spawn(move || {
        let result = thread.join();
        // After a signal nobody waits for this any more.
        let _ = ended_sender.send(());
        result
    });
    let served = runtime.block_on(http::serve(service, options, ended, bound));
    engine.shutdown(Shutdown::Now);
    match waiter.join() {
        Ok(result) => result.context("the engine stopped")?,
        Err(_) => bail!("the thread that waits for the engine panicked"),
    }
    served
}

/// Where it listens, what can be asked, and a line to try it with.
fn announce(address: SocketAddr, service: &Service) -> std::io::Result<()> {
    let mut models = vec![service.base.to_string()];
    models.extend(service.adapters());
    let model = models.get(1).unwrap_or(&models[0]);
    Voice::Out.line(format_args!("listening on http://{address}"))?;
    Voice::Out.line(format_args!("base url http://{address}/v1, models: {}", models.join(", ")))?;
    Voice::Out.line("try:")?;
    Voice::Out.line(format_args!(
        "  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' -d \
         '{{\"model\": \"{model}\", \"messages\": [{{\"role\": \"user\", \"content\": \
         \"On Friday, Clara painted 12 blue boats in Lisbon.\"}}]}}'"
    ))
}
