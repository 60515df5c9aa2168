//! `GET /metrics`: what the engine counted, in Prometheus' text format 0.0.4.

use std::fmt::Write;
use std::sync::Arc;

use amphora_engine::Metrics;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use super::App;

/// What a number is to Prometheus.
#[derive(Clone, Copy)]
enum Kind {
    /// Only grows.
    Counter,
    /// How things stand.
    Gauge,
}

/// Answers with all numbers as they were after the last step.
pub async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let text = render(&app.service.engine.metrics());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

fn render(metrics: &Metrics) -> String {
    use Kind::{Counter, Gauge};
    let mut out = String::new();
    let mut one = |kind, name: &str, help: &str, value: u64| {
        head(&mut out, kind, name, help);
        writeln!(out, "amphora_{name} {value}").expect("a string takes any text");
    };
    one(Counter, "steps_total", "Steps run.", metrics.steps);
    one(Counter, "prompt_tokens_total", "Prompt tokens computed.", metrics.prompt_tokens);
    one(Counter, "generation_tokens_total", "Tokens of answers.", metrics.tokens);
    one(Gauge, "requests_running", "Sequences that run.", metrics.running as u64);
    one(Gauge, "requests_waiting", "Requests that wait.", metrics.waiting as u64);
    one(Gauge, "kv_blocks", "Blocks of the cache.", metrics.kv_blocks_total as u64);
    one(Gauge, "kv_blocks_used", "Blocks that hold positions.", metrics.kv_blocks_used as u64);
    let cached = metrics.kv_blocks_cached as u64;
    one(Gauge, "kv_blocks_cached", "Blocks kept for prompts that begin alike.", cached);
    let prefix = metrics.prefix;
    let help = "Tokens looked for in the prefix cache.";
    one(Counter, "prefix_queried_tokens_total", help, prefix.queried_tokens);
    one(Counter, "prefix_hit_tokens_total", "Tokens found there.", prefix.hit_tokens);
    one(Counter, "prefix_evicted_blocks_total", "Blocks it gave up.", prefix.evicted_blocks);
    one(Counter, "preemptions_total", "Sequences that lost their blocks.", metrics.preemptions);
    one(Gauge, "adapters_hot", "Adapters on the device.", metrics.adapters_hot as u64);
    let host_bytes = metrics.adapter_host_bytes as u64;
    one(Gauge, "adapter_host_bytes", "Bytes of adapters in host memory.", host_bytes);
    let reads = metrics.adapter_reads;
    one(Counter, "adapter_reads_total", "Adapters read again from their files.", reads);
    head(&mut out, Counter, "requests_finished_total", "Requests that ended, by reason.");
    let finished = &metrics.finished;
    for (reason, count) in [
        ("stop", finished.stop),
        ("length", finished.length),
        ("cancelled", finished.cancelled),
        ("failed", finished.failed),
    ] {
        writeln!(out, "amphora_requests_finished_total{{reason=\"{reason}\"}} {count}")
            .expect("a string takes any text");
    }
    out
}

fn head(out: &mut String, kind: Kind, name: &str, help: &str) {
    let kind = match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
    };
    write!(out, "# HELP amphora_{name} {help}\n# TYPE amphora_{name} {kind}\n")
        .expect("a string takes any text");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_its_help_and_type() {
        let text = render(&Metrics { steps: 7, ..Metrics::default() });
        assert!(
            text.contains("# TYPE amphora_steps_total counter\namphora_steps_total 7\n"),
            "{text}"
        );
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            assert!(value.parse::<u64>().is_ok(), "{line}");
            let family = name.split('{').next().expect("a name");
            assert!(text.contains(&format!("# TYPE {family} ")), "{line}");
        }
    }
}
