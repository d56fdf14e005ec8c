//! `[server]`: the HTTP listener and its limits.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::check::{duration_in, number_in, size_in};
use crate::{units, ConfigError};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address and port to listen on. Default `127.0.0.1:8000`. An address that is not loopback needs a tenant key
    /// or `allow_unauthenticated`.
    pub bind: SocketAddr,
    /// Serve without keys on an address that others can reach. Default `false`.
    pub allow_unauthenticated: bool,
    /// Largest request body. Default `8 MiB`, 1 KiB to 1 GiB.
    #[serde(with = "units::size")]
    pub max_body: ByteSize,
    /// Time that a request's body may take to arrive; later gets 408. Default `60s`, 100ms to 1h.
    #[serde(with = "units::duration")]
    pub body_timeout: Duration,
    /// Requests that may wait for the scheduler; one more gets 429 with Retry-After. Default 256, 1 to 100000.
    pub max_queued: usize,
    /// Threads that serve HTTP. Default 2, 1 to 1024.
    pub http_workers: usize,
    /// Time that running streams get to finish after SIGTERM. Default `30s`, 0s to 1h.
    #[serde(with = "units::duration")]
    pub shutdown_deadline: Duration,
    /// A silent stream gets an SSE comment this often, so that proxies keep it open. Default `15s`, 100ms to 1h.
    #[serde(with = "units::duration")]
    pub keep_alive_ping: Duration,
    /// Host names, besides loopback ones, that a loopback server accepts in the Host header. Default none.
    pub allowed_hosts: Vec<String>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)),
            allow_unauthenticated: false,
            max_body: ByteSize::mib(8),
            body_timeout: Duration::from_secs(60),
            max_queued: 256,
            http_workers: 2,
            shutdown_deadline: Duration::from_secs(30),
            keep_alive_ping: Duration::from_secs(15),
            allowed_hosts: Vec::new(),
        }
    }
}

impl ServerConfig {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let hour = Duration::from_secs(3600);
        size_in("server.max_body", self.max_body, ByteSize::kib(1), ByteSize::gib(1))?;
        number_in("server.max_queued", self.max_queued, 1, 100_000)?;
        number_in("server.http_workers", self.http_workers, 1, 1024)?;
        duration_in("server.shutdown_deadline", self.shutdown_deadline, Duration::ZERO, hour)?;
        let tenth = Duration::from_millis(100);
        duration_in("server.body_timeout", self.body_timeout, tenth, hour)?;
        duration_in("server.keep_alive_ping", self.keep_alive_ping, tenth, hour)?;
        match self.allowed_hosts.iter().position(|host| host.trim().is_empty()) {
            Some(i) => Err(ConfigError::invalid(format!("server.allowed_hosts[{i}]"), "\"\"", "empty host name")),
            None => Ok(()),
        }
    }
}
