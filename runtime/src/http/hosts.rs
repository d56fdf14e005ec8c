//! The Host header of servers that only this machine should reach.
//!
//! A web page can make a browser resolve its own name to 127.0.0.1 (DNS rebinding) and then read a loopback server's answers.
//! Its requests carry the page's name in Host, so a loopback server answers only to loopback names and to those configured.

use std::net::IpAddr;

use actix_web::http::{header, Uri};
use actix_web::HttpRequest;
use keepsake_config::ServerConfig;

use super::error::ApiError;

pub(crate) struct Hosts {
    /// Lower case, without port. `None`: any host is accepted.
    allowed: Option<Vec<String>>,
}

impl Hosts {
    /// A server that others may reach checks only if `allowed_hosts` is set.
    pub(crate) fn new(server: &ServerConfig) -> Self {
        let checks = server.bind.ip().is_loopback() || !server.allowed_hosts.is_empty();
        let names = server.allowed_hosts.iter().map(|host| host_name(host).to_ascii_lowercase());
        Self { allowed: checks.then(|| names.collect()) }
    }

    pub(crate) fn check(&self, request: &HttpRequest) -> Result<(), ApiError> {
        let Some(allowed) = &self.allowed else {
            return Ok(());
        };
        let headers = request.headers().get_all(header::HOST).map(|value| value.to_str().unwrap_or("\u{fffd}"));
        let mut hosts: Vec<&str> = headers.collect();
        // An absolute URL in the request line overrides the header.
        hosts.extend(Uri::host(request.uri()));
        if hosts.is_empty() {
            return Err(ApiError::host_not_allowed(""));
        }
        match hosts.iter().find(|host| !is_allowed(host, allowed)) {
            Some(host) => Err(ApiError::host_not_allowed(host)),
            None => Ok(()),
        }
    }
}

fn is_allowed(host: &str, allowed: &[String]) -> bool {
    let name = host_name(host).to_ascii_lowercase();
    let is_loopback = name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    is_loopback || name == "localhost" || name.ends_with(".localhost") || allowed.contains(&name)
}

/// Without port, brackets of IPv6 and the root's dot.
fn host_name(host: &str) -> &str {
    let host = host.trim();
    if let Some((address, _port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    let name = match host.split_once(':') {
        // More than one colon: a bare IPv6 address.
        Some((_, rest)) if rest.contains(':') => host,
        Some((name, _port)) => name,
        None => host,
    };
    name.strip_suffix('.').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_and_configured_ones() {
        let allowed = ["chat.example.org".to_owned()];
        let good = [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "app.localhost:1",
            "127.0.0.1",
            "127.0.0.1:8000",
            "127.9.9.9",
            "[::1]",
            "[::1]:8000",
            "::1",
            "chat.example.org:443",
            "Chat.Example.ORG",
        ];
        for host in good {
            assert!(is_allowed(host, &allowed), "{host}");
        }
        let bad = [
            "",
            "evil.example.org",
            "localhost.evil.org",
            "notlocalhost",
            "10.0.0.1",
            "0.0.0.0",
            "[::2]:8000",
            "127.0.0.1.evil.org",
            "localhost@evil.org",
            "x.chat.example.org",
        ];
        for host in bad {
            assert!(!is_allowed(host, &allowed), "{host}");
        }
    }
}
