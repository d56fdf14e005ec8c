//! The HTTP interface: OpenAI's wire formats in, [`StartTurn`](crate::messages::session::StartTurn)s out, turn events back as
//! JSON or server-sent events.
//!
//! May depend on: `gateway` (through the trait in `service.rs`), `messages::session`, `telemetry`. Never on the scheduler, tiers
//! or actors.
//!
//! Invariants:
//! - Every route but `/health` is behind the guard (`guard.rs`): deny by default, also for unknown URLs and wrong methods.
//! - Every error has OpenAI's shape and is made in `error.rs`; a panic in a handler is a 500, never a dead worker.
//! - A client that goes away drops its turn, streamed or not (see [`bind`]).
//! - Nothing is buffered without bound: bodies stop at `server.max_body` and `server.body_timeout`, streams are pulled by the socket.
//!
//! Deliberately absent: CORS headers, TLS, compression, tools, images, log probabilities, `n > 1`.

mod body;
mod chat;
mod chat_input;
mod completions;
mod error;
mod fields;
mod generation;
mod guard;
mod hosts;
mod keys;
mod probes;
mod responses;
mod routes;
mod sampling;
mod service;
mod sse;
mod tokenize;
mod usage;

#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix_web::body::BoxBody;
use actix_web::dev::{Server, ServiceFactory, ServiceRequest, ServiceResponse};
use actix_web::middleware::from_fn;
use actix_web::{web, App, HttpRequest, HttpServer};
use keepsake_config::Config;

use self::hosts::Hosts;
use self::keys::Keys;
use self::service::TurnService;
use crate::gateway::Gateway;

/// Turns have ended or been cut before the server is stopped; what is left is writing their last bytes.
const STOP_GRACE_SECONDS: u64 = 1;
/// How long a connection that is being closed may take to read its last answer (a 413 while the client still sends).
const LINGER: Duration = Duration::from_secs(3);

/// Binds the listener and returns the server, which runs when it is awaited or spawned, and the addresses it got.
///
/// The caller owns signals and shutdown: `server.handle().stop(true)` stops accepting and lets running streams finish for
/// up to `server.shutdown_deadline`.
///
/// A client that goes away must stop its turn. actix drops a streamed body when a write fails, but while a handler waits it
/// keeps a connection whose read half is closed (`h1_allow_half_closed`, on by default), so an abandoned request without
/// streaming would generate to its end. With half-closed connections off, end of file on the socket drops handler and body
/// alike. The price: a client that shuts its write half down before it has read the answer gets none.
pub fn bind(config: &Config, gateway: Gateway) -> io::Result<(Server, Vec<SocketAddr>)> {
    bind_service(config, Arc::new(gateway))
}

fn bind_service(config: &Config, service: Arc<dyn TurnService>) -> io::Result<(Server, Vec<SocketAddr>)> {
    let http = web::Data::new(Http::new(config, service));
    let server = HttpServer::new(move || app(http.clone()))
        .workers(config.server.http_workers)
        .disable_signals()
        .shutdown_timeout(STOP_GRACE_SECONDS)
        .h1_allow_half_closed(false)
        .tcp_nodelay(true)
        .client_disconnect_timeout(LINGER)
        .bind(config.server.bind)?;
    let addresses = server.addrs();
    Ok((server.run(), addresses))
}

/// What every handler shares.
pub(crate) struct Http {
    service: Arc<dyn TurnService>,
    settings: Settings,
}

/// The configuration as requests need it.
struct Settings {
    keys: Keys,
    hosts: Hosts,
    /// Bytes.
    max_body: usize,
    body_timeout: Duration,
    ping: Duration,
}

impl Http {
    fn new(config: &Config, service: Arc<dyn TurnService>) -> Self {
        let settings = Settings {
            keys: Keys::new(&config.tenants),
            hosts: Hosts::new(&config.server),
            max_body: usize::try_from(config.server.max_body.as_u64()).unwrap_or(usize::MAX),
            body_timeout: config.server.body_timeout,
            ping: config.server.keep_alive_ping,
        };
        Self { service, settings }
    }

    fn of(request: &HttpRequest) -> &Self {
        request.app_data::<web::Data<Self>>().expect("app() adds it to every request")
    }
}

fn app(
    http: web::Data<Http>,
) -> App<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<BoxBody>,
        Error = actix_web::Error,
        InitError = (),
    >,
> {
    App::new()
        .app_data(http)
        .configure(routes::configure)
        .default_service(web::to(routes::not_found))
        .wrap(from_fn(guard::guard))
}
